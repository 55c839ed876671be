/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "daemon/job/model/finding.h"

struct job;

/* Collects the findings that hold after the last step. */
void findings_of(const struct job *job, struct findings *findings);
