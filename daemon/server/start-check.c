/* SPDX-License-Identifier: Apache-2.0 */

/* Checks users, groups, the key and folders before the daemon starts. */

#include "daemon/server/start-check.h"

#include <grp.h>
#include <libgen.h>
#include <pwd.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/link/key-file.h"
#include "daemon/link/secure-stream.h"
#include "daemon/server/accounts.h"

#define UNIT_FOLDER "/etc/zerod/"
#define UNIT_USER "zerod"

const char *check_become(const char *user, const char *path)
{
    const struct passwd *entry;

    if (!user && (geteuid() != 0 || strncmp(path, UNIT_FOLDER, strlen(UNIT_FOLDER)) != 0 || !getpwnam(UNIT_USER)))
        return "";
    user = user ? user : UNIT_USER;
    entry = getpwnam(user);
    if (!entry) {
        fprintf(stderr, "zerod: --user: there is no user \"%s\"\n", user);
        return NULL;
    }
    if (initgroups(user, entry->pw_gid) < 0 || setgid(entry->pw_gid) < 0 || setuid(entry->pw_uid) < 0) {
        fprintf(stderr, "zerod: --user %s: %s\n", user, strerror(errno));
        return NULL;
    }
    return user;
}

static bool check_user_names(const struct config *config)
{
    const struct config_listen *listen = &config->listen;
    const struct {
        const struct config_names *users, *groups;
        const char *section;
    } lists[] = {{&listen->allow_users, &listen->allow_groups, "listen"},
                 {&listen->admin_users, &listen->admin_groups, "listen"},
                 {NULL, &config->checkpoint.allow_groups, "checkpoint.allow_groups"}};
    bool right = true;

    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        struct accounts accounts = {0};
        char why[256] = "no memory";
        int r = lists[i].users ? accounts_users(&accounts, lists[i].users, lists[i].section, why, sizeof(why)) : 0;

        if (r == 0)
            r = accounts_groups(&accounts, lists[i].groups, lists[i].section, why, sizeof(why));
        if (r < 0)
            fprintf(stderr, "zerod: %s\n", why);
        right = right && r == 0;
        accounts_deinit(&accounts);
    }
    return right;
}

/* Checks the key file. A credential is not checked, because it exists only while the unit runs. */
static bool check_key(const char *path)
{
    struct secure_stream_key key;
    char why[512];
    int r;

    if (!path || strncmp(path, "/run/credentials/", strlen("/run/credentials/")) == 0)
        return true;
    r = key_file_read(&key, path, why, sizeof(why));
    if (r < 0)
        fprintf(stderr, "zerod: %s\n", why);
    sodium_memzero(&key, sizeof(key));
    return r == 0;
}

/* Checks the socket's folder. A missing folder below /run is no error, because the unit may make it when it starts. */
static bool check_socket_folder(const char *path)
{
    _cleanup_free_ char *copy = strdup(path);
    const char *folder = copy ? dirname(copy) : "/";

    if (access(folder, W_OK | X_OK) == 0 || (errno == ENOENT && strncmp(path, "/run/", 5) == 0))
        return true;
    fprintf(stderr, "zerod: listen.socket %s: its folder cannot be written to: %s\n", path, strerror(errno));
    return false;
}

/*
 * Checks the checkpoint folder. The folder may be missing if its parent is writable, or if its parent is
 * /var/lib/zerod, which the unit makes when it starts.
 */
static bool check_checkpoint_folder(const char *dir)
{
    _cleanup_free_ char *copy = dir ? strdup(dir) : NULL;
    const char *at = copy;

    if (!copy || access(at, R_OK | W_OK | X_OK) == 0)
        return true;
    if (errno == ENOENT)
        at = dirname(copy);
    if (at != dir && (access(at, W_OK | X_OK) == 0 || (errno == ENOENT && strcmp(at, "/var/lib/zerod") == 0)))
        return true;
    fprintf(stderr, "zerod: checkpoint.dir %s: %s cannot be written to: %s\n", dir, at, strerror(errno));
    return false;
}

bool check_places(const struct config *config)
{
    bool names = check_user_names(config), key = check_key(config->world.key_file);
    bool socket = check_socket_folder(config->listen.socket), folder = check_checkpoint_folder(config->checkpoint.dir);

    return names && key && socket && folder;
}
