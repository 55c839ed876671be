/* SPDX-License-Identifier: Apache-2.0 */

/* Writes and checks access control lists, without libacl, which would save no lines. */

#include "core/base/acl.h"

#include <assert.h>
#include <endian.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <linux/xattr.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "core/base/base.h"

struct encoded {
    struct posix_acl_xattr_header header;
    struct posix_acl_xattr_entry entries[ACL_MAX_ENTRIES];
    size_t n;
};

void acl_add_users(struct acl *acl, const uid_t *uids, size_t n)
{
    assert(acl->n_uids <= ACL_MAX_NAMES);
    for (size_t i = 0; i < n && acl->n_uids < ACL_MAX_NAMES; i++)
        acl->uids[acl->n_uids++] = uids[i];
}

void acl_add_groups(struct acl *acl, const gid_t *gids, size_t n)
{
    assert(acl->n_gids <= ACL_MAX_NAMES);
    for (size_t i = 0; i < n && acl->n_gids < ACL_MAX_NAMES; i++)
        acl->gids[acl->n_gids++] = gids[i];
}

static void add_acl_entry(struct encoded *encoded, unsigned tag, mode_t permissions, uint32_t id)
{
    assert(encoded->n < ACL_MAX_ENTRIES);
    encoded->entries[encoded->n++] =
        (struct posix_acl_xattr_entry){.e_tag = htole16(tag), .e_perm = htole16(permissions & 7), .e_id = htole32(id)};
}

int acl_write(const struct acl *acl, const char *path, bool inherited)
{
    const char *attribute = inherited ? XATTR_NAME_POSIX_ACL_DEFAULT : XATTR_NAME_POSIX_ACL_ACCESS;
    const uint32_t nobody = (uint32_t)ACL_UNDEFINED_ID;
    struct encoded encoded = {.header.a_version = htole32(POSIX_ACL_XATTR_VERSION)};

    add_acl_entry(&encoded, ACL_USER_OBJ, acl->mode >> 6, nobody);
    for (size_t i = 0; i < acl->n_uids; i++)
        add_acl_entry(&encoded, ACL_USER, acl->named, acl->uids[i]);
    add_acl_entry(&encoded, ACL_GROUP_OBJ, acl->mode >> 3, nobody);
    for (size_t i = 0; i < acl->n_gids; i++)
        add_acl_entry(&encoded, ACL_GROUP, acl->named, acl->gids[i]);
    if (encoded.n > 2) /* the mask limits the file's group and all named users and groups */
        add_acl_entry(&encoded, ACL_MASK, (acl->mode >> 3) | acl->named, nobody);
    add_acl_entry(&encoded, ACL_OTHER, acl->mode, nobody);
    return lsetxattr(path, attribute, &encoded, offsetof(struct encoded, entries[encoded.n]), 0) < 0 ? -errno : 0;
}

/* Return: true if the entry lets only the owner, root and this process's user read or write. */
static bool is_harmless(const struct posix_acl_xattr_entry *entry)
{
    uint32_t id = le32toh(entry->e_id);
    uint16_t tag = le16toh(entry->e_tag);

    return tag == ACL_USER_OBJ || tag == ACL_MASK || (tag == ACL_USER && (id == 0 || id == geteuid())) ||
           !(le16toh(entry->e_perm) & (ACL_READ | ACL_WRITE));
}

bool acl_lets_others(int fd, mode_t mode)
{
    struct encoded acl;
    ssize_t n_bytes = fgetxattr(fd, XATTR_NAME_POSIX_ACL_ACCESS, &acl, offsetof(struct encoded, n));

    if (n_bytes < (ssize_t)sizeof(acl.header)) /* no list, or too long: the mode's group bits limit what it allows */
        return mode & (S_IRWXG | S_IRWXO);
    for (size_t i = 0; i < ((size_t)n_bytes - sizeof(acl.header)) / sizeof(acl.entries[0]); i++)
        if (!is_harmless(&acl.entries[i]))
            return true;
    return false;
}

/* Adds the listed groups that may write the file. Return: true if the file's own group may write it. */
static bool add_named_groups(const struct encoded *acl, gid_t *gids, size_t max, size_t *n)
{
    bool own = false;

    for (size_t i = 0; i < acl->n; i++) {
        bool may = le16toh(acl->entries[i].e_perm) & ACL_WRITE;
        uint16_t tag = le16toh(acl->entries[i].e_tag);

        own = own || (may && tag == ACL_GROUP_OBJ);
        if (may && tag == ACL_GROUP && *n < max)
            gids[(*n)++] = le32toh(acl->entries[i].e_id);
    }
    return own;
}

int acl_groups(const char *path, gid_t *gids, size_t max)
{
    struct encoded acl;
    ssize_t n_bytes;
    struct stat st;
    size_t n = 0;
    bool own;

    if (lstat(path, &st) < 0)
        return -errno;
    own = st.st_mode & S_IWGRP; /* with a list, these bits are its mask, which limits all names */
    n_bytes = own ? lgetxattr(path, XATTR_NAME_POSIX_ACL_ACCESS, &acl, offsetof(struct encoded, n)) : 0;
    if (n_bytes >= (ssize_t)sizeof(acl.header)) {
        acl.n = ((size_t)n_bytes - sizeof(acl.header)) / sizeof(acl.entries[0]);
        own = add_named_groups(&acl, gids, max, &n);
    }
    if (n == 0 && own && max > 0)
        gids[n++] = st.st_gid;
    return (int)n;
}
