/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A diagnostic as an entry of the log. */

struct diagnostic;

/* Writes the text, and for the journal code, class, first parameter, rank, step and micro-batch as fields. */
void log_diagnostic(const struct diagnostic *diagnostic);
