/* SPDX-License-Identifier: Apache-2.0 */

#include "core/base/who-may.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/base/acl.h"
#include "core/base/base.h"

enum { NAME_BYTES = 64, ENTRY_BYTES = 4096 }; /* a group with too many members is shown by its number */

static void name_group(gid_t gid, char name[NAME_BYTES])
{
    char buffer[ENTRY_BYTES];
    struct group group, *found = NULL;

    if (getgrgid_r(gid, &group, buffer, sizeof(buffer), &found) == 0 && found)
        snprintf(name, NAME_BYTES, "%s", found->gr_name);
    else
        snprintf(name, NAME_BYTES, "%u", gid);
}

static void name_this_user(char name[NAME_BYTES])
{
    char buffer[ENTRY_BYTES];
    struct passwd user, *found = NULL;

    if (getpwuid_r(geteuid(), &user, buffer, sizeof(buffer), &found) == 0 && found)
        snprintf(name, NAME_BYTES, "%s", found->pw_name);
    else
        snprintf(name, NAME_BYTES, "USER");
}

static bool is_in(gid_t gid)
{
    gid_t gids[1024];
    int n = getgroups(ARRAY_SIZE(gids), gids);

    for (int i = 0; i < n; i++)
        if (gids[i] == gid)
            return true;
    return getegid() == gid;
}

void who_may_open(const char *path, char text[WHO_MAY_BYTES])
{
    char names[WHO_MAY_BYTES / 2] = "", first[NAME_BYTES] = "", name[NAME_BYTES], user[NAME_BYTES];
    gid_t gids[ACL_MAX_NAMES];
    int n = acl_groups(path, gids, ARRAY_SIZE(gids));
    bool is_member = false;

    for (int i = 0; i < n; i++) {
        name_group(gids[i], name);
        if (i == 0)
            snprintf(first, sizeof(first), "%s", name);
        if (strlen(names) + strlen(name) + 2 < sizeof(names))
            snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", i > 0 ? ", " : "", name);
        is_member = is_member || is_in(gids[i]);
    }
    name_this_user(user);
    if (n == -EACCES)
        snprintf(text, WHO_MAY_BYTES, "; a folder above it is closed to user %s", user);
    else if (n <= 0 || is_member)
        snprintf(text, WHO_MAY_BYTES,
                 "; listen.allow_users, listen.allow_groups and listen.mode of the job say who may");
    else
        snprintf(text, WHO_MAY_BYTES, "; members of %s may (as root: usermod -aG %s %s; then log in again)", names,
                 first, user);
}
