/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests zerodctl explain with tracebacks that DDP printed (tests/explain, made by make.py there) and one-line messages
 * of public reports. Each result is compared with tests/golden-texts/explain-NAME.txt. Also tests what is merged, kept
 * apart or left out, and that no bytes crash it.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <string.h>

#include "client/ctl/explain.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/diagnosis/diagnosis.h"
#include "tests/core/diagnosis/golden-text.h"

/*
 * Return: all diagnostics of a text, as the command prints them, which the caller frees. Unless NULL, n_found is set.
 */
static char *explained(const char *text, size_t n_bytes, size_t *n_found)
{
    struct explain_messages *messages = malloc(sizeof(*messages));
    struct strbuf buf = {0};
    char *copy;

    assert_non_null(messages);
    assert_int_equal(explain_read(messages, text, n_bytes), 0);
    for (size_t i = 0; i < messages->n; i++) {
        struct diagnostic *d = explain_say(&messages->items[i], messages);

        strbuf_add(&buf, "%s%s", i ? "\n" : "", d->text);
        diagnostic_unref(d);
    }
    if (n_found)
        *n_found = messages->n;
    explain_messages_deinit(messages);
    free(messages);
    copy = strdup(strbuf_text(&buf));
    strbuf_deinit(&buf);
    assert_non_null(copy);
    return copy;
}

static void check_lines(const char *name, const char *text)
{
    while (*text) {
        size_t n = strcspn(text, "\n");

        if (n > 150 || (n && text[n - 1] == ' '))
            fail_msg("%s: a line is overlong or ends in a space: %.*s", name, (int)n, text);
        text += n + 1;
    }
}

/* Calls visit for each traceback with its name, without ".txt", and its text. Return: the number of tracebacks. */
static size_t each_traceback(void (*visit)(const char *name, const char *text))
{
    char *folder = source_path("tests", "explain");
    DIR *dir = opendir(folder);
    struct dirent *entry;
    size_t n = 0;

    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        size_t len = strlen(entry->d_name);
        char *path, *text;

        if (len < 5 || strcmp(entry->d_name + len - 4, ".txt") != 0)
            continue;
        path = source_path("tests/explain", entry->d_name);
        text = read_text(path);
        assert_non_null(text);
        entry->d_name[len - 4] = '\0';
        visit(entry->d_name, text);
        free(text);
        free(path);
        n++;
    }
    closedir(dir);
    free(folder);
    return n;
}

static void compare(const char *name, const char *text)
{
    char *got, golden[300];
    size_t n;

    got = explained(text, strlen(text), &n);
    if (n != 1)
        fail_msg("%s: %zu messages, not 1:\n%s", name, n, got);
    check_lines(name, got);
    snprintf(golden, sizeof(golden), "explain-%s", name);
    golden_check(golden, got);
    free(got);
}

static void check_tracebacks(void **state)
{
    (void)state;
    assert_true(each_traceback(compare) >= 14);
}

#define DDP_TWICE                                                                                                      \
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "         \
    "reasons: 1) Use of a module parameter outside the `forward` function. "
#define FRAME_CHECKPOINT                                                                                               \
    "  File \"/env/torch/utils/checkpoint.py\", line 157, in backward\n"                                               \
    "    torch.autograd.backward(outputs_with_grad, args_with_grad)\n"

static void check_reports(void **state)
{
    static const struct {
        const char *name, *text;
    } reports[] = {
        {"deepspeed-id", "AssertionError: The parameter 657 has already been reduced. Gradient computed twice for this "
                         "partition. Multiple gradient reduction is currently not supported\n"},
        {"deepspeed-name",
         "Traceback (most recent call last):\n" FRAME_CHECKPOINT
         "  File \"/env/deepspeed/runtime/zero/stage_1_and_2.py\", line 1215, in reduce_independent_p_g_buckets\n"
         "AssertionError: The parameter vpm.encoder.layers.26.mlp.fc2.bias has already been reduced.            "
         "Gradient computed twice for this partition.            Multiple gradient reductions are currently not "
         "supported"},
        {"deepspeed-bare",
         "Traceback (most recent call last):\n"
         "  File \"/env/transformers/trainer.py\", line 2700, in training_step\n" FRAME_CHECKPOINT
         "  File \"/env/deepspeed/runtime/zero/stage3.py\", line 1303, in __add_grad_to_ipg_bucket\n"
         "    assert len(set(p.ds_id for p in self.params_in_ipg_bucket)) == len(self.params_in_ipg_bucket)\n"
         "AssertionError\n"},
        {"swift",
         "Traceback (most recent call last):\n"
         "  File \"/env/swift/llm/train/sft.py\", line 100, in train\n"
         "  File \"/env/transformers/trainer.py\", line 3698, in training_step\n" FRAME_CHECKPOINT DDP_TWICE
         "\nParameter at index 279 with name base_model.model.model.layers.27.mlp.down_proj.lora_B.default."
         "weight has been marked as ready twice. This means that multiple autograd engine hooks have fired.\n"},
        {"index-only", "Traceback (most recent call last):\n" FRAME_CHECKPOINT DDP_TWICE
                       "Parameter at index 127 has been marked as ready twice.\n"},
        {"not-finding",
         "python train.py --ddp_find_unused_parameters False\n"
         "Traceback (most recent call last):\n"
         "  File \"/env/transformers/trainer.py\", line 3698, in training_step\n" FRAME_CHECKPOINT DDP_TWICE
         "Parameter at index 127 has been marked as ready twice.\n"},
        {"no-traceback", DDP_TWICE "Parameter at index 127 has been marked as ready twice.\n"},
        {"no-traceback-not-finding", "torchrun train.py --ddp_find_unused_parameters=False\n" DDP_TWICE
                                     "Parameter at index 127 has been marked as ready twice.\n"},
        {"one-rank", "Expected to have finished reduction in the prior iteration before starting a new one. Parameter "
                     "indices which did not receive grad for rank 1: 390 391 412 413 414 415 416 In addition, you can "
                     "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"},
        {"ours", "zerod.DuplicateGradient: E1001 duplicate gradient refused: rank 0, step 0, micro-batch 0\n"
                 "  parameter      a.weight\n"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(reports); i++)
        compare(reports[i].name, reports[i].text);
}

#define PRIOR(rank, list)                                                                                              \
    "[rank" rank "]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "  \
    "one. You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True`\n"   \
    "[rank" rank "]: Parameter indices which did not receive grad for rank " rank ": " list "\n"

/* Ranks list different parameters, in lines that are mixed. Each rank has its own text, and the cause is the data. */
static void check_ranks_that_differ(void **state)
{
    static const char text[] = "[rank1]: Traceback (most recent call last):\n"
                               "[rank0]: Traceback (most recent call last):\n" PRIOR("0", "2 3") PRIOR("1", "4 5");
    size_t n;
    char *got = explained(text, sizeof(text) - 1, &n);

    (void)state;
    assert_int_equal(n, 2);
    golden_check("explain-ranks-differ", got);
    free(got);
}

static void check_nothing(void **state)
{
    static const char text[] =
        "Traceback (most recent call last):\nRuntimeError: expected scalar type Half\nCODE1001 x\n"
        "E9999 is none of ours, E1001\n";
    size_t n;
    char *got = explained(text, sizeof(text) - 1, &n);

    (void)state;
    if (n)
        fail_msg("nothing to explain, got\n%s", got);
    free(got);
}

/* Only the end of a long log is explained. Messages beyond the limit are left out. */
static void check_bounds(void **state)
{
    size_t n_bytes = 3 * EXPLAIN_MAX_BYTES, n, at = 0;
    char *text = malloc(n_bytes), *got;

    (void)state;
    assert_non_null(text);
    memset(text, 'x', n_bytes);
    memcpy(text, "E1001 too far away", 18);
    memcpy(text + n_bytes - 24, "\nE1003 early push refused", 24);
    got = explained(text, n_bytes, &n);
    assert_int_equal(n, 1);
    assert_non_null(strstr(got, "E1003"));
    free(got);
    for (unsigned i = 0; at + 80 < n_bytes; i++)
        at += snprintf(text + at, 80, "Parameter at index %u: Expected to mark a variable ready only once.\n", i);
    got = explained(text, at, &n);
    assert_int_equal(n, EXPLAIN_MAX_FOUND);
    free(got);
    free(text);
}

/* ---- any bytes ----------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static uint64_t random_below(uint64_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % n;
}

/* Cuts, overwrites and doubles pieces of a real traceback. The copy has its exact size, so that sanitizers see more. */
static void mangle(const char *name, const char *text)
{
    size_t n = strlen(text);

    (void)name;
    for (int round = 0; round < 150; round++) {
        size_t start = random_below(n), len = 1 + random_below(n - start);
        char *piece = malloc(len), *got;

        assert_non_null(piece);
        memcpy(piece, text + start, len);
        for (uint64_t k = random_below(40); k > 0; k--)
            piece[random_below(len)] = (char)(random_below(3) ? random_below(256) : "\n\0 []E:"[random_below(7)]);
        if (len > 20)
            memmove(piece + random_below(len - 10), piece + random_below(len - 10), 10);
        got = explained(piece, len, NULL);
        free(got);
        free(piece);
    }
}

static void check_any_bytes(void **state)
{
    char noise[4096];

    (void)state;
    assert_true(each_traceback(mangle) >= 14);
    for (int round = 0; round < 200; round++) {
        size_t n = random_below(sizeof(noise));
        char *got;

        for (size_t i = 0; i < n; i++)
            noise[i] = (char)random_below(256);
        got = explained(noise, n, NULL);
        assert_string_equal(got, "");
        free(got);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_tracebacks), cmocka_unit_test(check_reports), cmocka_unit_test(check_ranks_that_differ),
        cmocka_unit_test(check_nothing),    cmocka_unit_test(check_bounds),  cmocka_unit_test(check_any_bytes),
    };

    return cmocka_run_group_tests_name("explain", tests, NULL, NULL);
}
