/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * POSIX access control lists (acl(5)), as the kernel reads and writes them. The owner of a file may put any user and
 * any group into a list, also groups of which he is no member.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { ACL_MAX_NAMES = 128, ACL_MAX_ENTRIES = 2 * ACL_MAX_NAMES + 4 };

struct acl {
    mode_t mode;  /* rights of the owner, the file's group, and others, as in chmod */
    mode_t named; /* rights of each user and group below: one digit as in chmod */
    uid_t uids[ACL_MAX_NAMES];
    gid_t gids[ACL_MAX_NAMES];
    size_t n_uids, n_gids;
};

/* Add names to the list. Names beyond ACL_MAX_NAMES are left out. */
void acl_add_users(struct acl *acl, const uid_t *uids, size_t n);
void acl_add_groups(struct acl *acl, const gid_t *gids, size_t n);
/* Replaces the list of the file. inherited: replaces the list that new files of this folder get instead of the umask. A
 * list without names acts as chmod. Return: 0; -ENOTSUP if the file system has no such lists; or another -errno. */
int acl_write(const struct acl *acl, const char *path, bool inherited);
/* Return: true if anybody except the owner, root and this process's user may read or write the open file. mode: the
 * file's mode. */
bool acl_lets_others(int fd, mode_t mode);
/* Finds the listed groups that may write the file. Without such groups, finds the file's own group if that may write
 * it. Return: the number of groups, at most max; or -errno if the file cannot be examined. */
int acl_groups(const char *path, gid_t *gids, size_t max);
