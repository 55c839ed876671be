/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl report`: what the daemon says of itself and what the kernel says of the daemon, its ranks and the
 * machine, in one JSON object (docs/schema/report.json). No environment, no
 * command lines, no contents of files but those of /proc and /sys that are named here.
 */

struct json_object;

/* answer: the daemon's answer to "report"; this function frees it, also on failure. Return: text to be freed, or NULL:
 * out of memory. */
char *report_text(struct json_object *answer);

/* "zerod-report-JOB-YYYYMMDDTHHMMSSZ.json", to be freed; NULL: out of memory. */
char *report_name(struct json_object *answer);
