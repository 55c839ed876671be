/* SPDX-License-Identifier: Apache-2.0 */

/* Turns the names of users and groups into numbers. */

#include "daemon/server/accounts.h"

#include <assert.h>
#include <ctype.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"

static bool parse_id(const char *name, unsigned long *id)
{
    char *end;

    errno = 0;
    *id = strtoul(name, &end, 10);
    return isdigit((unsigned char)name[0]) && !*end && errno == 0 && *id < UINT32_MAX;
}

int accounts_users(struct accounts *accounts, const struct config_names *names, const char *section, char *why,
                   size_t why_size)
{
    assert(accounts->n_uids == 0); /* uids has room only for these names */
    accounts->uids = calloc(names->n_items + 1, sizeof(*accounts->uids));
    if (!accounts->uids)
        return -ENOMEM;
    for (size_t i = 0; i < names->n_items; i++) {
        unsigned long id;
        const struct passwd *entry = parse_id(names->items[i], &id) ? NULL : getpwnam(names->items[i]);

        if (entry)
            id = entry->pw_uid;
        else if (!parse_id(names->items[i], &id)) {
            snprintf(why, why_size, "%s: there is no user \"%s\"", section, names->items[i]);
            return -ENOENT;
        }
        accounts->uids[accounts->n_uids++] = (uid_t)id;
    }
    return 0;
}

int accounts_groups(struct accounts *accounts, const struct config_names *names, const char *section, char *why,
                    size_t why_size)
{
    assert(accounts->n_gids == 0); /* gids has room only for these names */
    accounts->gids = calloc(names->n_items + 1, sizeof(*accounts->gids));
    if (!accounts->gids)
        return -ENOMEM;
    for (size_t i = 0; i < names->n_items; i++) {
        unsigned long id;
        const struct group *entry = parse_id(names->items[i], &id) ? NULL : getgrnam(names->items[i]);

        if (entry)
            id = entry->gr_gid;
        else if (!parse_id(names->items[i], &id)) {
            snprintf(why, why_size,
                     "%s: there is no group \"%s\" on this machine (systemd-sysusers makes that of the service)",
                     section, names->items[i]);
            return -ENOENT;
        }
        accounts->gids[accounts->n_gids++] = (gid_t)id;
    }
    return 0;
}

void accounts_deinit(struct accounts *accounts)
{
    free(accounts->uids);
    free(accounts->gids);
    *accounts = (struct accounts){0};
}
