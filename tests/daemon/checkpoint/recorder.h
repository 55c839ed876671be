/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A disk that records its calls, and a machine on which they are repeated, up to a loss of power. Of what was not
 * synced any part may then be lost: of a file's bytes all, none, those behind the first half, or all but the size; of a
 * folder's entries each change by itself, where a rename is one change. Removing a folder is recorded as its single
 * steps. For tests with cmocka.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/checkpoint/disk.h"

enum act_kind { ACT_MAKE_FOLDER, ACT_CREATE, ACT_WRITE, ACT_TRUNCATE, ACT_SYNC, ACT_ENTRIES, ACT_BEGIN, ACT_RETURN };

enum { NO_NODE = -1, RECORDER_NAME_BYTES = 64, RECORDER_MAX_NODES = 1024, RECORDER_MAX_ACTS = 4096 };

/* What some names of a folder become. */
struct entries_change {
    unsigned n;
    struct {
        char name[RECORDER_NAME_BYTES];
        int node; /* NO_NODE: there is no such entry any more */
    } names[2];
};

struct act {
    enum act_kind kind;
    int node; /* the file or folder */
    struct entries_change change;
    void *bytes; /* owned */
    uint64_t n_bytes, offset;
    unsigned save; /* ACT_BEGIN, ACT_RETURN: which, and whether it succeeded */
    bool succeeded;
};

struct recorder {
    struct disk disk;
    uint64_t inodes[RECORDER_MAX_NODES]; /* of the real file system; 0: removed */
    bool is_folder[RECORDER_MAX_NODES];
    int n_nodes; /* node 0 is the root */
    struct act acts[RECORDER_MAX_ACTS];
    unsigned n_acts;
    unsigned n_calls, fails_at; /* this call fails, */
    bool goes_on;               /* and if not, all behind it, as of a daemon that is killed there */
    unsigned first_failure;     /* how many acts there were before it */
};

/* root: a folder; what happens in it is recorded. */
struct recorder *recorder_new(const char *root);
void recorder_free(struct recorder *recorder);
void recorder_note_act(struct recorder *recorder, enum act_kind kind, unsigned save, bool succeeded);

/* ---- the machine --------------------------------------------------------------------------------------- */

struct machine;

/* How an item that was not synced comes out of the loss of power. Changes of entries are lost or kept. */
enum outcome { LOST, KEPT, ZEROES, HALF, N_OUTCOMES };

struct machine *machine_new(const struct recorder *recorder);
void machine_free(struct machine *machine);
/* Repeats the next act. */
void machine_go_on(struct machine *machine);

/* What was not synced: files and changes of entries. */
size_t machine_n_items(const struct machine *machine);
bool machine_item_is_file(const struct machine *machine, size_t item);
/* Lays out, in an empty folder, what the disk has after a loss of power. outcomes: of each item. */
void machine_lay_out(const struct machine *machine, const enum outcome *outcomes, const char *folder);
