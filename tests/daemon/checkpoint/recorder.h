/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A disk that records its calls, and a machine that repeats them up to a loss of power. Then any part of what was not
 * synced may be lost. Of a file's bytes all, none or the second half may be lost, or all become zeroes. Of a folder's
 * changes of entries each may be lost; a rename is one change. Removing a folder is recorded as its single steps. For
 * tests with cmocka.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/checkpoint/disk.h"

enum act_kind { ACT_MAKE_FOLDER, ACT_CREATE, ACT_WRITE, ACT_TRUNCATE, ACT_SYNC, ACT_ENTRIES, ACT_BEGIN, ACT_RETURN };

enum { NO_NODE = -1, RECORDER_NAME_BYTES = 64, RECORDER_MAX_NODES = 1024, RECORDER_MAX_ACTS = 4096 };

/* A change of one or two names in a folder. */
struct entries_change {
    unsigned n;
    struct {
        char name[RECORDER_NAME_BYTES];
        int node; /* NO_NODE if the entry is removed */
    } names[2];
};

struct act {
    enum act_kind kind;
    int node; /* the file or folder */
    struct entries_change change;
    void *bytes; /* owned */
    uint64_t n_bytes, offset;
    unsigned save; /* number of the save, for ACT_BEGIN and ACT_RETURN */
    bool succeeded;
};

struct recorder {
    struct disk disk;
    uint64_t inodes[RECORDER_MAX_NODES]; /* in the real file system; 0: removed */
    bool is_folder[RECORDER_MAX_NODES];
    int n_nodes; /* node 0 is the root */
    struct act acts[RECORDER_MAX_ACTS];
    unsigned n_acts;
    unsigned n_calls, fails_at; /* index of the call that fails */
    bool goes_on;               /* whether later calls succeed; else they fail, as after a kill */
    unsigned first_failure;     /* the number of acts before the failure */
};

/* root is the folder whose calls are recorded. */
struct recorder *recorder_new(const char *root);
void recorder_free(struct recorder *recorder);
void recorder_note_act(struct recorder *recorder, enum act_kind kind, unsigned save, bool succeeded);

/* ---- the machine --------------------------------------------------------------------------------------- */

struct machine;

/* What happens to an item that was not synced. A change of entries is only LOST or KEPT. */
enum outcome { LOST, KEPT, ZEROES, HALF, N_OUTCOMES };

struct machine *machine_new(const struct recorder *recorder);
void machine_free(struct machine *machine);
/* Repeats the next act. */
void machine_go_on(struct machine *machine);

/* Return: the number of items that were not synced, files and changes of entries. */
size_t machine_n_items(const struct machine *machine);
bool machine_item_is_file(const struct machine *machine, size_t item);
/* Writes what the disk has after the loss of power to an empty folder. outcomes has one for each item. */
void machine_lay_out(const struct machine *machine, const enum outcome *outcomes, const char *folder);
