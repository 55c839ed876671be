/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The numbers of the users and groups that the configuration names. The daemon looks the names up once, when it starts.
 */

#include <stddef.h>
#include <sys/types.h>

struct config_names;

struct accounts {
    uid_t *uids;
    size_t n_uids;
    gid_t *gids;
    size_t n_gids;
};

/*
 * Look up names. section: the section of the configuration, for the error message. Return: 0, or -errno with a message
 * in why (-ENOENT for an unknown user or group). The caller calls accounts_deinit() even after an error.
 */
int accounts_users(struct accounts *accounts, const struct config_names *names, const char *section, char *why,
                   size_t why_size);
int accounts_groups(struct accounts *accounts, const struct config_names *names, const char *section, char *why,
                    size_t why_size);
void accounts_deinit(struct accounts *accounts);
