/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Writes a diagnostic to the log. */

struct diagnostic;

/* Logs the diagnostic's text. The journal also gets code, class, first parameter, rank, step and micro-batch as
 * fields. */
void log_diagnostic(const struct diagnostic *diagnostic);
