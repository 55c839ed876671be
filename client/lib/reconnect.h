/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sends Hello, and reconnects to the daemon or its successor after a break. */

struct request_hello;
struct reply_welcome;
struct zerod;
struct zerod_options;

/* Keeps the options of zerod_connect() for every Hello. Return: 0 or -ENOMEM, without a text. */
int resume_init(struct zerod *c, const struct zerod_options *options);
void resume_deinit(struct zerod *c);

/* Return: the Hello of this handle. The handle owns its strings. */
struct request_hello resume_hello(const struct zerod *c);

/* Keeps the daemon's answer to Hello. Return: 0 or fatal. */
int resume_keep_welcome(struct zerod *c, const struct reply_welcome *welcome);

/* The implementation of call.mend.on_break. arg: the handle. */
int resume_after_break(void *arg);
