/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/checkpoint/recorder.h"

#include <dirent.h>
#include <fcntl.h>
#include <libgen.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "tests/daemon/checkpoint/sample.h"

/* ---- recording ----------------------------------------------------------------------------------------- */

static struct recorder *recorder_of(const struct disk *disk)
{
    return (struct recorder *)(uintptr_t)container_of(disk, const struct recorder, disk);
}

static int add_node(struct recorder *r, uint64_t inode, bool is_folder)
{
    if (r->n_nodes == RECORDER_MAX_NODES)
        abort();
    r->inodes[r->n_nodes] = inode;
    r->is_folder[r->n_nodes] = is_folder;
    return r->n_nodes++;
}

/* Return: the node of this inode, or NO_NODE if it is outside of the root. */
static int node_of_inode(const struct recorder *r, uint64_t inode)
{
    for (int i = r->n_nodes; i-- > 0;)
        if (r->inodes[i] == inode)
            return i;
    return NO_NODE;
}

static int node_of(const struct recorder *r, int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 ? node_of_inode(r, st.st_ino) : NO_NODE;
}

static uint64_t inode_at(int dir, const char *name)
{
    struct stat st;

    return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 ? st.st_ino : 0;
}

static struct act *add_act(struct recorder *r, enum act_kind kind, int node)
{
    struct act *act = &r->acts[r->n_acts++];

    if (r->n_acts == RECORDER_MAX_ACTS || node == NO_NODE)
        abort();
    *act = (struct act){.kind = kind, .node = node};
    return act;
}

static void add_change(struct act *act, const char *name, int node)
{
    if (strlen(name) >= RECORDER_NAME_BYTES)
        abort();
    strcpy(act->change.names[act->change.n].name, name);
    act->change.names[act->change.n++].node = node;
}

static bool fails(struct recorder *r)
{
    unsigned at = r->n_calls++;

    if (at == r->fails_at)
        r->first_failure = r->n_acts;
    return r->goes_on ? at == r->fails_at : at >= r->fails_at;
}

static int record_make_folder(const struct disk *disk, int dir, const char *name)
{
    struct recorder *r = recorder_of(disk);
    char path[256];
    int result, parent = dir, node;

    if (fails(r))
        return -EIO;
    result = disk_hasty.make_folder(&disk_hasty, dir, name);
    if (result < 0)
        return result;
    node = add_node(r, inode_at(dir, name), true);
    snprintf(path, sizeof(path), "%s", name);
    if (dir == AT_FDCWD)
        parent = open(dirname(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    add_change(add_act(r, ACT_MAKE_FOLDER, node_of(r, parent)), dir == AT_FDCWD ? strrchr(name, '/') + 1 : name, node);
    if (dir == AT_FDCWD)
        close(parent);
    return 0;
}

static int record_open_folder(const struct disk *disk, int dir, const char *name)
{
    return fails(recorder_of(disk)) ? -EIO : disk_hasty.open_folder(&disk_hasty, dir, name);
}

static int record_create(const struct disk *disk, int dir, const char *name)
{
    struct recorder *r = recorder_of(disk);
    int fd = fails(r) ? -EIO : disk_hasty.create(&disk_hasty, dir, name);

    if (fd >= 0)
        add_change(add_act(r, ACT_CREATE, node_of(r, dir)), name, add_node(r, inode_at(dir, name), false));
    return fd;
}

static int record_write(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset)
{
    struct recorder *r = recorder_of(disk);
    int result = fails(r) ? -EIO : disk_hasty.write(&disk_hasty, fd, bytes, n_bytes, offset);
    struct act *act;

    if (result < 0)
        return result;
    act = add_act(r, ACT_WRITE, node_of(r, fd));
    act->bytes = memcpy(malloc(n_bytes), bytes, n_bytes);
    act->n_bytes = n_bytes;
    act->offset = offset;
    return 0;
}

static int record_truncate(const struct disk *disk, int fd, uint64_t n_bytes)
{
    struct recorder *r = recorder_of(disk);
    int result = fails(r) ? -EIO : disk_hasty.truncate(&disk_hasty, fd, n_bytes);

    if (result == 0)
        add_act(r, ACT_TRUNCATE, node_of(r, fd))->n_bytes = n_bytes;
    return result;
}

static int record_sync(const struct disk *disk, int fd)
{
    struct recorder *r = recorder_of(disk);

    if (fails(r))
        return -EIO;
    add_act(r, ACT_SYNC, node_of(r, fd));
    return 0;
}

static int record_rename(const struct disk *disk, int dir, const char *from, const char *to)
{
    struct recorder *r = recorder_of(disk);
    uint64_t inode = inode_at(dir, from);
    int result = fails(r) ? -EIO : disk_hasty.rename(&disk_hasty, dir, from, to);
    struct act *act;

    if (result < 0)
        return result;
    act = add_act(r, ACT_ENTRIES, node_of(r, dir));
    add_change(act, from, NO_NODE);
    add_change(act, to, node_of_inode(r, inode));
    return 0;
}

static int record_exchange(const struct disk *disk, int dir, const char *one, const char *other)
{
    struct recorder *r = recorder_of(disk);
    uint64_t inode = inode_at(dir, one), other_inode = inode_at(dir, other);
    int result = fails(r) ? -EIO : disk_hasty.exchange(&disk_hasty, dir, one, other);
    struct act *act;

    if (result < 0)
        return result;
    act = add_act(r, ACT_ENTRIES, node_of(r, dir));
    add_change(act, one, node_of_inode(r, other_inode));
    add_change(act, other, node_of_inode(r, inode));
    return 0;
}

static int record_remove_folder(const struct disk *disk, int dir, const char *name)
{
    struct recorder *r = recorder_of(disk);
    int fd = fails(r) ? -EIO : disk_hasty.open_folder(&disk_hasty, dir, name), folder, result;
    const struct dirent *entry;
    DIR *stream;

    if (fd < 0)
        return fd;
    folder = node_of(r, fd);
    stream = fdopendir(fd);
    while ((entry = readdir(stream))) {
        if (entry->d_name[0] == '.')
            continue;
        r->inodes[node_of_inode(r, inode_at(fd, entry->d_name))] = 0;
        add_change(add_act(r, ACT_ENTRIES, folder), entry->d_name, NO_NODE);
    }
    closedir(stream);
    result = disk_hasty.remove_folder(&disk_hasty, dir, name);
    if (result < 0)
        return result;
    r->inodes[folder] = 0;
    add_change(add_act(r, ACT_ENTRIES, node_of(r, dir)), name, NO_NODE);
    return 0;
}

struct recorder *recorder_new(const char *root)
{
    struct recorder *r = calloc(1, sizeof(*r));

    r->disk = (struct disk){
        .make_folder = record_make_folder,
        .open_folder = record_open_folder,
        .create = record_create,
        .write = record_write,
        .truncate = record_truncate,
        .sync = record_sync,
        .rename = record_rename,
        .exchange = record_exchange,
        .remove_folder = record_remove_folder,
    };
    r->fails_at = r->first_failure = UINT32_MAX;
    add_node(r, inode_at(AT_FDCWD, root), true);
    return r;
}

void recorder_free(struct recorder *r)
{
    for (unsigned i = 0; i < r->n_acts; i++)
        free(r->acts[i].bytes);
    free(r);
}

void recorder_note_act(struct recorder *r, enum act_kind kind, unsigned save, bool succeeded)
{
    struct act *act = add_act(r, kind, 0);

    act->save = save;
    act->succeeded = succeeded;
}

/* ---- the machine --------------------------------------------------------------------------------------- */

enum { MAX_ENTRIES = 64, MAX_ITEMS = 256 };

struct contents {
    uint8_t *bytes; /* owned */
    uint64_t n_bytes;
};

struct entry {
    char name[RECORDER_NAME_BYTES];
    int node;
};

struct folder_entries {
    struct entry all[MAX_ENTRIES];
    unsigned n;
};

struct node {
    bool is_folder;
    /* Fields of a file. */
    struct contents synced, now;
    bool is_dirty;
    /* Fields of a folder; `entries` are the synced ones. */
    struct folder_entries entries;
    const struct entries_change *changes[MAX_ENTRIES];
    unsigned n_changes;
};

struct item {
    int node;
    int change; /* index of a change; -1: the bytes of a file */
};

struct machine {
    const struct recorder *recorder;
    struct node *nodes;
    unsigned n_done;
    struct item items[MAX_ITEMS];
    size_t n_items;
};

static void contents_set(struct contents *dst, const struct contents *src)
{
    free(dst->bytes);
    *dst = (struct contents){
        memcpy(malloc(src->n_bytes + 1), src->bytes ? src->bytes : (const uint8_t *)"", src->n_bytes), src->n_bytes};
}

static void contents_resize(struct contents *c, uint64_t n_bytes)
{
    c->bytes = realloc(c->bytes, n_bytes + 1);
    if (n_bytes > c->n_bytes)
        memset(c->bytes + c->n_bytes, 0, n_bytes - c->n_bytes);
    c->n_bytes = n_bytes;
}

static void apply(struct folder_entries *e, const struct entries_change *change)
{
    for (unsigned i = 0; i < change->n; i++) {
        unsigned k = 0;

        while (k < e->n && strcmp(e->all[k].name, change->names[i].name) != 0)
            k++;
        if (k < e->n)
            e->all[k] = e->all[--e->n];
        if (change->names[i].node == NO_NODE)
            continue;
        assert_true(e->n < MAX_ENTRIES);
        snprintf(e->all[e->n].name, RECORDER_NAME_BYTES, "%s", change->names[i].name);
        e->all[e->n++].node = change->names[i].node;
    }
}

static void sync_node(struct node *node)
{
    for (unsigned i = 0; i < node->n_changes; i++)
        apply(&node->entries, node->changes[i]);
    node->n_changes = 0;
    if (node->is_dirty)
        contents_set(&node->synced, &node->now);
    node->is_dirty = false;
}

/* Lists the changes of the node that were not synced, and those of all nodes to which its entries may lead. */
static void add_items(struct machine *m, int id, bool *seen)
{
    const struct node *node = &m->nodes[id];

    if (seen[id])
        return;
    seen[id] = true;
    assert_true(m->n_items + node->n_changes + 1 < MAX_ITEMS);
    if (node->is_dirty)
        m->items[m->n_items++] = (struct item){id, -1};
    for (unsigned i = 0; i < node->n_changes; i++)
        m->items[m->n_items++] = (struct item){id, (int)i};
    for (unsigned i = 0; i < node->entries.n; i++)
        add_items(m, node->entries.all[i].node, seen);
    for (unsigned i = 0; i < node->n_changes; i++)
        for (unsigned k = 0; k < node->changes[i]->n; k++)
            if (node->changes[i]->names[k].node != NO_NODE)
                add_items(m, node->changes[i]->names[k].node, seen);
}

void machine_go_on(struct machine *m)
{
    const struct act *act = &m->recorder->acts[m->n_done++];
    struct node *node = &m->nodes[act->node];
    bool seen[RECORDER_MAX_NODES] = {false};

    switch (act->kind) {
    case ACT_MAKE_FOLDER:
    case ACT_CREATE:
    case ACT_ENTRIES:
        assert_true(node->n_changes < MAX_ENTRIES);
        node->changes[node->n_changes++] = &act->change;
        break;
    case ACT_WRITE:
        if (node->now.n_bytes < act->offset + act->n_bytes)
            contents_resize(&node->now, act->offset + act->n_bytes);
        memcpy(node->now.bytes + act->offset, act->bytes, act->n_bytes);
        node->is_dirty = true;
        break;
    case ACT_TRUNCATE:
        contents_resize(&node->now, act->n_bytes);
        node->is_dirty = true;
        break;
    case ACT_SYNC:
        sync_node(node);
        break;
    case ACT_BEGIN:
    case ACT_RETURN:
        break;
    }
    m->n_items = 0;
    add_items(m, 0, seen);
}

struct machine *machine_new(const struct recorder *recorder)
{
    struct machine *m = calloc(1, sizeof(*m));

    m->recorder = recorder;
    m->nodes = calloc((size_t)recorder->n_nodes, sizeof(*m->nodes));
    for (int i = 0; i < recorder->n_nodes; i++)
        m->nodes[i].is_folder = recorder->is_folder[i];
    return m;
}

void machine_free(struct machine *m)
{
    for (int i = 0; i < m->recorder->n_nodes; i++) {
        free(m->nodes[i].synced.bytes);
        free(m->nodes[i].now.bytes);
    }
    free(m->nodes);
    free(m);
}

size_t machine_n_items(const struct machine *m)
{
    return m->n_items;
}

bool machine_item_is_file(const struct machine *m, size_t item)
{
    return m->items[item].change < 0;
}

/* ---- after the loss ------------------------------------------------------------------------------------ */

/* Return: the outcome of a change of the node's entries, or of its bytes if change is -1. */
static enum outcome outcome_of(const struct machine *m, const enum outcome *outcomes, int node, int change)
{
    for (size_t i = 0; i < m->n_items; i++)
        if (m->items[i].node == node && m->items[i].change == change)
            return outcomes[i];
    return LOST;
}

static void lay_out_file(const struct node *node, enum outcome outcome, int dir, const char *name)
{
    const struct contents *c = outcome == LOST ? &node->synced : &node->now;
    size_t n = outcome == HALF ? c->n_bytes / 2 : c->n_bytes;
    _cleanup_free_ uint8_t *zeroes = calloc(1, n + 1);
    _cleanup_close_ int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, outcome == ZEROES || n == 0 ? zeroes : c->bytes, n), n);
}

static void lay_out(const struct machine *m, const enum outcome *outcomes, int id, int dir)
{
    const struct node *node = &m->nodes[id];
    struct folder_entries entries = node->entries;

    for (unsigned i = 0; i < node->n_changes; i++)
        if (outcome_of(m, outcomes, id, (int)i) != LOST)
            apply(&entries, node->changes[i]);
    for (unsigned i = 0; i < entries.n; i++) {
        const struct node *inner = &m->nodes[entries.all[i].node];
        const char *name = entries.all[i].name;

        if (inner->is_folder) {
            _cleanup_close_ int fd = -1;

            assert_int_equal(mkdirat(dir, name, 0777), 0);
            fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            lay_out(m, outcomes, entries.all[i].node, fd);
        } else {
            lay_out_file(inner, inner->is_dirty ? outcome_of(m, outcomes, entries.all[i].node, -1) : LOST, dir, name);
        }
    }
}

void machine_lay_out(const struct machine *m, const enum outcome *outcomes, const char *folder)
{
    _cleanup_close_ int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    assert_true(fd >= 0);
    lay_out(m, outcomes, 0, fd);
}
