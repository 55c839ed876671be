/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct coordinator;
struct job;

/* The coordinator of a job on one node. It decides at once. */

/* Return: 0 or -ENOMEM. */
int alone_new(struct coordinator **out, struct job *job);
