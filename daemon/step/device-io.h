/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job whose gradients, state and weights lie on GPUs: what form.c, gather.c, window.c and collect.c do with memory
 * that is not the daemon's. The step itself is step-device.c's; engines are devices.h's.
 *
 * Where the optimizer is offloaded the state is here, and so is a copy of the weights, as in a job without GPUs: what
 * reads or writes state then works on that, and device_job_store() brings the weights to the GPUs. Otherwise
 * what has to be looked at here is copied here: a parameter's state into the segment of a reader; initial weights, and
 * all of the state when a write window is committed, through the mirror (state.h), so that the code that judges and
 * stores is the same. done(): result 0, -ENOMEM, or -ECANCELED: the job is going, and nothing is to be done any more
 * but to free what the call used; never from within the call. Loop thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/wire/wire.h"
#include "daemon/engines/devices.h"

struct job;
struct job_rank;
struct segment;
struct verification;

/* The layout stands: job->devices, nothing runs. Return: 0 or -ENOMEM. */
int device_job_new(struct job *job);
/* Pages of what engines share, of what is staged, and on several nodes a mirror's for initial weights. Any thread,
 * once. Return: 0 or -errno. */
int device_job_reserve(struct job *job);
/* job->devices has its pages: job_formed() or job_unformed() follows; with several nodes when node 0 has said ENGINE.
 */
void device_job_start(struct job *job);

/* Rank 0's initial weights, from its ring; it waits for the answer. */
void device_job_init(struct job *job, struct job_rank *rank, const struct request_init *request);

/* Several nodes: initial weights have come in, laid out as weights; stages 1 and 2: where the state has them. Masters
 * of what is owned, and the weights, to the GPUs. weights: must stay until done. Return: 0, or -errno. */
int device_job_adopt(struct job *job, const uint8_t *weights, devices_done done, void *userdata);

/* A parameter's values in fp32, as far as they are here, from its start on; dst must stay until done. Return: 0 or
 * -ENOMEM. */
int device_job_read(struct job *job, uint32_t param, enum wire_state_kind kind, float *dst, devices_done done,
                    void *userdata);

/* Stage 3: the same of its weights, in their own type, from the first that is here on. */
int device_job_read_weights(struct job *job, uint32_t param, uint8_t *dst, devices_done done, void *userdata);

/* The weights, as the layout places them; pages are reserved first. Return: 0 or -ENOMEM. */
int device_job_fill(struct job *job, const struct segment *segment, devices_done done, void *userdata);

/* What the mirror takes when it is loaded whole. */
uint64_t device_job_mirror_bytes(const struct job *job);
/* State and weights into the mirror, and back; offloaded: the weights, to the GPUs alone. Return: 0, -ENOMEM, or
 * -ECANCELED: by devices_cancel(). */
int device_job_load(struct job *job, devices_done done, void *userdata);
int device_job_store(struct job *job, devices_done done, void *userdata);
/* The mirror's pages go, if it is one. */
void device_job_empty(struct job *job);

/* v->copy has room: what was pushed comes there, and v->work is posted. */
void device_job_verify(struct verification *v);
