/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl report`: the daemon's own report, and the kernel's data about the daemon, its ranks and the machine, in one
 * JSON object (docs/schema/report.json). It has no environment, no command lines, and only the files of /proc and /sys
 * that are named here.
 */

struct json_object;

/* answer: the daemon's answer to "report". The function frees it, also on failure. Return: text to be freed, or NULL if
 * memory is short. */
char *report_text(struct json_object *answer);

/* Return: "zerod-report-JOB-YYYYMMDDTHHMMSSZ.json", to be freed, or NULL if memory is short. */
char *report_name(struct json_object *answer);
