/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl report`: writes one JSON object (docs/schema/report.json) with the daemon's own report and the kernel's
 * data about the daemon, its ranks and the machine. It has no environment, no command lines, and only those files of
 * /proc and /sys that report-command.c names.
 */

struct json_object;

/* answer: the daemon's answer to "report". The function frees it, also on failure. Return: text to be freed, or NULL if
 * memory is short. */
char *report_text(struct json_object *answer);

/* Return: "zerod-report-JOB-YYYYMMDDTHHMMSSZ.json", to be freed, or NULL if memory is short. */
char *report_name(struct json_object *answer);
