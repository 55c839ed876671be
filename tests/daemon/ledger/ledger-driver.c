/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Drives the ledger from another program: one operation a line on standard
 * input, one verdict a line on standard output, so that an independent model
 * can be held against it. All numbers are decimal.
 *
 *   init R P accumulate(0|1) t0t1t2...        ok (P characters, 1 = trainable)
 *   attach r inc                              same | new
 *   next r                                    step mb
 *   begin r step mb                           ok | E1002 | E1003 | E1004
 *   push r inc attempt step mb seq param      admitted k | redo k | retry | dropped |
 *                                             E1001 | E1002 | E1003 | E1004 | E1103
 *   post r param                              ok | none
 *   sum r param value                         ok | none
 *   findsum r param pass                      value | none
 *   end r step mb                             ok | retry | E1002 | E1003 | incomplete
 *   forget r                                  ok
 *   abandon r                                 ok | must_abort
 *   ask r                                     ok | retry | E1003
 *   abort, commit                             ok
 *   state r       open asked n_ended n_pushed n_pushed_open last_sequence, then
 *                 last_ended_step last_ended_mb, or - when none has ended
 *   entry r param n_pushed n_posted n_summed n_redo
 *
 * Verdicts are flushed whenever the input read so far is used up. A line that
 * is not of this language ends the program with exit status 2.
 */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/ledger/ledger.h"

enum {
    MAX_ARGS = 7,
    READ_BYTES = 1 << 16,
};

struct command {
    const char *name;
    unsigned n_args; /* the first argument is the rank, unless there is none */
    void (*run)(struct ledger *ledger, const uint64_t *args);
};

static const char *verdict_name(int verdict)
{
    switch (verdict) {
    case LEDGER_ADMITTED:
        return "ok";
    case LEDGER_RETRY:
        return "retry";
    case LEDGER_DROPPED:
        return "dropped";
    case LEDGER_MUST_ABORT:
        return "must_abort";
    case LEDGER_E_PARAM:
        return "E1103";
    case LEDGER_E_STALE:
        return "E1002";
    case LEDGER_E_AFTER_BOUNDARY:
        return "E1004";
    case LEDGER_E_EARLY:
        return "E1003";
    case LEDGER_E_DUPLICATE:
        return "E1001";
    case LEDGER_E_INCOMPLETE:
        return "incomplete";
    }
    return "?";
}

static void run_attach(struct ledger *ledger, const uint64_t *args)
{
    puts(ledger_attach(ledger, (unsigned)args[0], args[1]) ? "new" : "same");
}

static void run_next(struct ledger *ledger, const uint64_t *args)
{
    struct ledger_position next = ledger_next(ledger, (unsigned)args[0]);

    printf("%" PRIu64 " %" PRIu32 "\n", next.step, next.micro_batch);
}

static void run_begin(struct ledger *ledger, const uint64_t *args)
{
    puts(verdict_name(ledger_begin(ledger, (unsigned)args[0], args[1], (uint32_t)args[2])));
}

static void run_push(struct ledger *ledger, const uint64_t *args)
{
    struct push_record record = {
        .incarnation = args[1],
        .attempt = (uint32_t)args[2],
        .step = args[3],
        .micro_batch = (uint32_t)args[4],
        .sequence = args[5],
        .part = (uint32_t)args[6],
    };
    uint16_t pass = 0;
    int verdict = ledger_push(ledger, (unsigned)args[0], &record, &pass);

    if (verdict == LEDGER_ADMITTED)
        printf("admitted %u\n", pass);
    else if (verdict == LEDGER_REDO)
        printf("redo %u\n", pass);
    else
        puts(verdict_name(verdict));
}

/* Return: the entry, or NULL if there is no such parameter. */
static const struct ledger_entry *find_entry(const struct ledger *ledger, const uint64_t *args)
{
    return args[1] < ledger->n_parts ? ledger_entry(ledger, (unsigned)args[0], (uint32_t)args[1]) : NULL;
}

static void run_post(struct ledger *ledger, const uint64_t *args)
{
    const struct ledger_entry *entry = find_entry(ledger, args);

    if (!entry || entry->n_posted == entry->n_pushed) {
        puts("none");
        return;
    }
    ledger_post(ledger, (unsigned)args[0], (uint32_t)args[1]);
    puts("ok");
}

static void run_sum(struct ledger *ledger, const uint64_t *args)
{
    const struct ledger_entry *entry = find_entry(ledger, args);

    if (!entry || entry->n_summed == entry->n_posted) {
        puts("none");
        return;
    }
    puts(ledger_sum(ledger, (unsigned)args[0], (uint32_t)args[1], args[2]) < 0 ? "no memory" : "ok");
}

static void run_findsum(struct ledger *ledger, const uint64_t *args)
{
    uint64_t sum;

    if (find_entry(ledger, args) && args[2] <= UINT16_MAX &&
        ledger_find_sum(ledger, (unsigned)args[0], (uint32_t)args[1], (uint16_t)args[2], &sum))
        printf("%" PRIu64 "\n", sum);
    else
        puts("none");
}

static void run_end(struct ledger *ledger, const uint64_t *args)
{
    puts(verdict_name(ledger_end(ledger, (unsigned)args[0], args[1], (uint32_t)args[2])));
}

static void run_forget(struct ledger *ledger, const uint64_t *args)
{
    ledger_forget(ledger, (unsigned)args[0]);
    puts("ok");
}

static void run_abandon(struct ledger *ledger, const uint64_t *args)
{
    puts(verdict_name(ledger_abandon(ledger, (unsigned)args[0])));
}

static void run_ask(struct ledger *ledger, const uint64_t *args)
{
    puts(verdict_name(ledger_ask(ledger, (unsigned)args[0])));
}

static void run_abort(struct ledger *ledger, const uint64_t *args)
{
    ledger_abort(ledger);
    puts("ok");
}

static void run_commit(struct ledger *ledger, const uint64_t *args)
{
    ledger_commit(ledger);
    puts("ok");
}

static void run_state(struct ledger *ledger, const uint64_t *args)
{
    const struct ledger_rank *rank = &ledger->ranks[args[0]];

    printf("%d %d %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu64, rank->open, rank->asked, rank->n_ended, rank->n_pushed,
           rank->n_pushed_open, rank->last_sequence);
    if (rank->last_ended.valid)
        printf(" %" PRIu64 " %" PRIu32 "\n", rank->last_ended.step, rank->last_ended.micro_batch);
    else
        puts(" -");
}

static void run_entry(struct ledger *ledger, const uint64_t *args)
{
    const struct ledger_entry *entry = find_entry(ledger, args);

    if (entry)
        printf("%u %u %u %u\n", entry->n_pushed, entry->n_posted, entry->n_summed, entry->n_redo);
    else
        puts("none");
}

static const struct command commands[] = {
    {"push", 7, run_push}, {"begin", 3, run_begin},     {"end", 3, run_end},       {"post", 2, run_post},
    {"sum", 3, run_sum},   {"findsum", 3, run_findsum}, {"state", 1, run_state},   {"entry", 2, run_entry},
    {"next", 1, run_next}, {"attach", 2, run_attach},   {"forget", 1, run_forget}, {"abandon", 1, run_abandon},
    {"ask", 1, run_ask},   {"abort", 0, run_abort},     {"commit", 0, run_commit},
};

/* Return: false if the next word is not a decimal number. */
static bool take_number(char **at, uint64_t *out)
{
    char *end, *start = *at + strspn(*at, " ");

    if (*start < '0' || *start > '9')
        return false;
    errno = 0;
    *out = strtoull(start, &end, 10);
    *at = end;
    return errno == 0 && (*end == ' ' || *end == '\0');
}

static bool run_init(struct ledger *ledger, char *at)
{
    uint64_t n_ranks, n_params, accumulate;
    _cleanup_free_ uint8_t *trainable = NULL;
    char *flags;

    if (!take_number(&at, &n_ranks) || !take_number(&at, &n_params) || !take_number(&at, &accumulate))
        return false;
    flags = at + strspn(at, " ");
    if (n_ranks == 0 || n_ranks > UINT16_MAX || n_params > UINT32_MAX || accumulate > 1 ||
        strspn(flags, "01") != n_params || flags[n_params] != '\0')
        return false;

    trainable = malloc(n_params + 1);
    if (!trainable)
        return false;
    for (uint64_t i = 0; i < n_params; i++)
        trainable[i] = flags[i] == '1';

    ledger_deinit(ledger);
    if (ledger_init(ledger, (struct ledger_ranks){.end = (unsigned)n_ranks, .n = (unsigned)n_ranks}, (uint32_t)n_params,
                    trainable, accumulate) < 0)
        return false;
    puts("ok");
    return true;
}

static bool run_line(struct ledger *ledger, char *line)
{
    size_t len = strcspn(line, " ");
    uint64_t args[MAX_ARGS] = {};
    char *at = line + len;

    if (len == 4 && !memcmp(line, "init", 4))
        return run_init(ledger, at);
    if (ledger->end_rank == 0)
        return false;

    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        const struct command *command = &commands[i];

        if (strlen(command->name) != len || memcmp(command->name, line, len))
            continue;
        for (unsigned k = 0; k < command->n_args; k++)
            if (!take_number(&at, &args[k]))
                return false;
        if (at[strspn(at, " ")] != '\0' || args[0] >= ledger->end_rank)
            return false;
        command->run(ledger, args);
        return true;
    }
    return false;
}

/* Runs the complete lines in the buffer. Return: how many bytes they have, or -1 after an invalid line. */
static ssize_t run_lines(struct ledger *ledger, char *buffer, size_t n_bytes)
{
    char *line = buffer, *end;

    while ((end = memchr(line, '\n', (size_t)(buffer + n_bytes - line)))) {
        *end = '\0';
        if (!run_line(ledger, line)) {
            fprintf(stderr, "ledger-driver: not understood: %s\n", line);
            return -1;
        }
        line = end + 1;
    }
    fflush(stdout);
    return line - buffer;
}

static int run(struct ledger *ledger)
{
    _cleanup_free_ char *buffer = NULL;
    size_t n_have = 0, n_room = 0;

    for (;;) {
        ssize_t n;

        if (n_room - n_have < READ_BYTES) {
            char *grown = realloc(buffer, n_room + 2 * READ_BYTES);

            if (!grown)
                return 1;
            buffer = grown;
            n_room += 2 * READ_BYTES;
        }

        n = read(STDIN_FILENO, buffer + n_have, n_room - n_have);
        if (n < 0)
            return 1;
        if (n == 0)
            return n_have ? 2 : 0;
        n_have += (size_t)n;

        n = run_lines(ledger, buffer, n_have);
        if (n < 0)
            return 2;
        n_have -= (size_t)n;
        memmove(buffer, buffer + n, n_have);
    }
}

int main(void)
{
    struct ledger ledger = {};
    int r = run(&ledger);

    fflush(stdout);
    ledger_deinit(&ledger);
    return r;
}
