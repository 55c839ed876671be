/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a journal that a daemon finds: as the head, and as records of the log with their headers. A head that
 * unpacks must pack, and the result must unpack and pack again to the same bytes. All data that is read from the log
 * must be inside of what was written.
 */

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/wire/journal-wire.h"
#include "daemon/memory/journal.h"

enum { MAX_BYTES = 1 << 20, HEADER_BYTES = 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_head(struct wire_arena *arena, const uint8_t *data, size_t size)
{
    static uint8_t packed[2][MAX_BYTES];
    struct stored_head head;
    char why[256] = "";
    int n[2], r = head_unpack(arena, data, size, &head, why, sizeof(why));

    assert(r == 0 || (r == WIRE_E_INVALID && *why));
    if (r != 0)
        return;
    n[0] = head_pack(arena, &head, packed[0], sizeof(packed[0]));
    assert(n[0] > 0 || n[0] == -EMSGSIZE || n[0] == 0);
    if (n[0] <= 0)
        return;
    r = head_unpack(arena, packed[0], (size_t)n[0], &head, why, sizeof(why));
    assert(r == 0);
    n[1] = head_pack(arena, &head, packed[1], sizeof(packed[1]));
    assert(n[1] == n[0] && memcmp(packed[0], packed[1], (size_t)n[0]) == 0);
}

/* Writes one record, then replaces its header and data by the input. */
static void check_log(struct journal *journal, const uint8_t *data, size_t size)
{
    struct journal_record record = {.type = JOURNAL_REQUEST, .data = data, .n_bytes = size - HEADER_BYTES};
    uint64_t at = 0, before;
    const uint8_t *first;

    journal_turn(journal, "head", 4);
    journal_append(journal, &record, NULL, 0);
    assert(journal_read(journal, &at, &record));
    first = (const uint8_t *)record.data - HEADER_BYTES;
    memcpy((void *)(uintptr_t)first, data, size);
    for (at = before = 0; journal_read(journal, &at, &record); before = at) {
        assert(at > before && (const uint8_t *)record.data == first + before + HEADER_BYTES);
        assert((const uint8_t *)record.data + record.n_bytes <= first + round_up(size, 8));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct wire_arena arena;
    static struct journal *journal;

    if (size > MAX_BYTES || (!arena.block && (wire_arena_init(&arena) < 0 || journal_new(&journal) < 0)))
        return 0;
    check_head(&arena, data, size);
    if (size >= HEADER_BYTES)
        check_log(journal, data, size);
    return 0;
}
