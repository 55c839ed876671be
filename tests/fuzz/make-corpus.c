/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes the seeds of fuzz-wire and fuzz-frame: one packed example of every message, and a few
 * conversations. Usage: make-corpus DIRECTORY (which has the folders wire and frame).
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/frame.h"
#include "daemon/wire.h"
#include "tests/wire-examples.h"

static uint8_t packet[FRAME_MAX_BYTES];

static int write_seed(const char *directory, const char *folder, const char *name, const void *data, int n)
{
    char path[4096];
    FILE *file;
    int r;

    if (n < 0)
        return n;
    snprintf(path, sizeof(path), "%s/%s/%s", directory, folder, name);
    file = fopen(path, "wb");
    if (!file)
        return -errno;
    r = fwrite(data, 1, n, file) == (size_t)n ? 0 : -EIO;
    if (fclose(file) != 0)
        r = -EIO;
    return r;
}

static int write_messages(const char *directory)
{
    struct wire_arena arena;
    char name[64];
    int r;

    r = wire_arena_init(&arena);
    for (unsigned type = 1; type < N_REQUEST_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "request-%s", request_type_name(type));
        r = write_seed(directory, "wire", name, packet,
                       wire_pack_request(&arena, &example_requests[type], packet, sizeof(packet)));
    }
    for (unsigned type = 1; type < N_REPLY_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "reply-%s", reply_type_name(type));
        r = write_seed(directory, "wire", name, packet,
                       wire_pack_reply(&arena, &example_replies[type], packet, sizeof(packet)));
    }
    wire_arena_deinit(&arena);
    return r;
}

/* One act of fuzz-frame is four bytes: verb, descriptors, size. */
static int write_talks(const char *directory)
{
    static const struct {
        const char *name;
        uint8_t verbs[8];
        uint8_t n_fds;
        uint16_t size;
        unsigned n_rounds;
    } talks[] = {
        {"pushes", {1, 1, 1, 1, 11}, 0, 40, 20},
        {"questions", {1, 11, 9, 5}, 0, 100, 20},
        {"segments", {9, 5}, 5, 60, 12},
        {"unread", {9, 12, 9, 12, 10}, 2, 20000, 12},
        {"bursts", {9, 9, 9, 9, 5, 10, 5}, 1, 9000, 20},
        {"bad-client", {1, 4, 11, 2}, 3, 65535, 8},
        {"death", {1, 9, 8, 11, 10}, 1, 60001, 4},
    };
    uint8_t *p;
    int r = 0;

    for (size_t i = 0; i < ARRAY_SIZE(talks) && !r; i++) {
        p = packet;
        for (unsigned round = 0; round < talks[i].n_rounds; round++) {
            for (unsigned k = 0; k < 8 && talks[i].verbs[k]; k++, p += 4) {
                p[0] = talks[i].verbs[k];
                p[1] = talks[i].n_fds;
                memcpy(p + 2, &talks[i].size, 2);
            }
        }
        r = write_seed(directory, "frame", talks[i].name, packet, p - packet);
    }
    return r;
}

int main(int argc, char **argv)
{
    int r;

    if (argc != 2) {
        fprintf(stderr, "usage: make-corpus DIRECTORY\n");
        return 64;
    }
    r = write_messages(argv[1]);
    if (!r)
        r = write_talks(argv[1]);
    if (r)
        fprintf(stderr, "make-corpus: %s\n", strerror(-r));
    return r ? 1 : 0;
}
