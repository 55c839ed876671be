/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A diagnostic as an entry of the log. */

struct diagnostic;

/* Logs the text. The journal also gets code, class, first parameter, rank, step and micro-batch as fields. */
void log_diagnostic(const struct diagnostic *diagnostic);
