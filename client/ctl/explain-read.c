/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds messages in a log. Launchers put "[rank1]: " or the like before every line, and the lines of several ranks are
 * mixed. So the text is first split into one stream per rank. In a stream, a message belongs to the traceback before it
 * and to the lines after it, up to the next traceback.
 */

#include "client/ctl/explain.h"

#include <ctype.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/diagnosis/diagnosis.h"

struct stream {
    int64_t rank; /* -1: lines without a rank */
    struct strbuf text;
};

struct streams {
    struct stream *items; /* [0]: without a rank, [1 + r]: rank r */
    size_t n;
};

/* A piece of text; not NUL-terminated. */
struct span {
    const char *data;
    size_t n;
};

/* ---- pieces of text ------------------------------------------------------------------------------------ */

static const char *find_in(struct span span, const char *needle)
{
    return span.data && span.n ? memmem(span.data, span.n, needle, strlen(needle)) : NULL;
}

static bool has(struct span span, const char *needle)
{
    return find_in(span, needle) != NULL;
}

/* The text after the needle; empty if the needle is not found. */
static struct span behind(struct span span, const char *needle)
{
    const char *at = find_in(span, needle);

    if (!at)
        return (struct span){0};
    at += strlen(needle);
    return (struct span){at, span.data + span.n - at};
}

static struct span first_line(struct span span)
{
    const char *end = span.n ? memchr(span.data, '\n', span.n) : NULL;

    return end ? (struct span){span.data, end - span.data} : span;
}

/* Removes the first line of *rest and returns it. */
static struct span next_line(struct span *rest)
{
    struct span line = first_line(*rest);
    size_t n = MIN(line.n + 1, rest->n);

    rest->data += n;
    rest->n -= n;
    return line;
}

static void copy_span(char *dst, size_t size, struct span span)
{
    size_t n = MIN(span.n, size - 1);

    if (n)
        memcpy(dst, span.data, n);
    dst[n] = '\0';
}

/* Reads digits at the start. Return: the number; or -1 if the text begins with no digit, or the number is too large. */
static int64_t leading_number(struct span span)
{
    int64_t value = 0;
    size_t n = 0;

    while (n < span.n && isdigit((unsigned char)span.data[n]) && value < INT32_MAX)
        value = value * 10 + span.data[n++] - '0';
    return n && value < INT32_MAX ? value : -1;
}

/* ---- streams ------------------------------------------------------------------------------------------- */

/* Removes all prefixes such as "[rank1]: ", "[rank 1] " and "[default1]:" from a line. Return: the rank of the last
 * prefix, or -1. */
static int64_t take_prefix(struct span *line)
{
    static const char *const words[] = {"[rank", "[default"};
    int64_t rank = -1;

    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        size_t n = strlen(words[i]);
        struct span rest;
        const char *end;
        int64_t number;

        if (line->n < n || memcmp(line->data, words[i], n) != 0)
            continue;
        rest = (struct span){line->data + n, line->n - n};
        if (rest.n && *rest.data == ' ')
            rest = (struct span){rest.data + 1, rest.n - 1};
        number = leading_number(rest);
        end = rest.n ? memchr(rest.data, ']', MIN(rest.n, 12)) : NULL;
        if (number < 0 || number >= EXPLAIN_MAX_RANKS || !end)
            continue;
        rank = number;
        end++;
        for (int k = 0; k < 2 && end < line->data + line->n && (*end == ':' || *end == ' '); k++)
            end++;
        *line = (struct span){end, line->data + line->n - end};
        i = -1; /* torchrun's prefix may precede torch's prefix */
    }
    return rank;
}

static void streams_deinit(struct streams *streams)
{
    for (size_t i = 0; i < streams->n; i++)
        strbuf_deinit(&streams->items[i].text);
    free(streams->items);
}

static int streams_init(struct streams *streams, struct span text)
{
    *streams = (struct streams){.n = 1 + EXPLAIN_MAX_RANKS};
    streams->items = calloc(streams->n, sizeof(*streams->items));
    if (!streams->items)
        return -ENOMEM;
    for (size_t i = 0; i < streams->n; i++)
        streams->items[i].rank = (int64_t)i - 1;
    while (text.n > 0) {
        struct span line = next_line(&text);
        struct strbuf *buf = &streams->items[1 + take_prefix(&line)].text;

        if (line.n && line.data[line.n - 1] == '\r')
            line.n--;
        strbuf_add_bytes(buf, line.data, line.n);
        strbuf_add_bytes(buf, "\n", 1);
        if (buf->cut) {
            streams_deinit(streams);
            return -ENOMEM;
        }
    }
    return 0;
}

/* ---- clues --------------------------------------------------------------------------------------------- */

/*
 * Looks for a value of find_unused_parameters, given as a keyword, an option or a key of a file. Ignores DDP's advice
 * to set it. Return: CLUE_FIND, CLUE_NOT_FIND or 0.
 */
static unsigned find_clue(struct span line)
{
    static const char word[] = "find_unused_parameters";
    struct span rest = behind(line, word);
    size_t i = 0;

    if (has(line, "by passing the keyword argument") || has(line, "Since `find_unused_parameters=True`"))
        return 0;
    while (i < rest.n && strchr("=:\"' ", rest.data[i]))
        i++;
    rest = (struct span){rest.data + i, rest.n - i};
    if (i && rest.n >= 4 && strncasecmp(rest.data, "true", 4) == 0)
        return CLUE_FIND;
    return i && rest.n >= 5 && strncasecmp(rest.data, "false", 5) == 0 ? CLUE_NOT_FIND : 0;
}

static bool tells_of_error(struct span line)
{
    return (has(line, "out of memory") || has(line, "due to error") || has(line, "OutOfMemoryError")) &&
           !has(line, "Connection closed by peer");
}

/* Finds clues for all messages of a text, because warnings and options are anywhere, and mostly without a rank. */
static void read_everywhere(const struct streams *streams, struct explain_message *common)
{
    for (size_t i = 0; i < streams->n; i++) {
        struct span rest = {strbuf_text(&streams->items[i].text), streams->items[i].text.n_bytes};

        while (rest.n > 0) {
            struct span line = next_line(&rest);

            common->clues |= find_clue(line);
            if (has(line, "None of the inputs have requires_grad=True"))
                common->clues |= CLUE_DEAD;
            if (!*common->exception && tells_of_error(line))
                copy_span(common->exception, sizeof(common->exception), line);
        }
    }
    /* If the text has both settings, the valid one is not known. */
    if ((common->clues & CLUE_FIND) && (common->clues & CLUE_NOT_FIND))
        common->clues &= ~(unsigned)(CLUE_FIND | CLUE_NOT_FIND);
}

static unsigned frame_clues(struct span line)
{
    unsigned clues = CLUE_TRACEBACK;

    if (!has(line, "File \""))
        return 0;
    if (has(line, "checkpoint") && has(line, ", in backward"))
        clues |= CLUE_CHECKPOINT;
    if (has(line, "/swift/"))
        clues |= CLUE_SWIFT;
    if (has(line, "/transformers/") || has(line, "/trl/"))
        clues |= CLUE_TRAINER;
    if (has(line, "/deepspeed/"))
        clues |= CLUE_DEEPSPEED;
    return clues;
}

static unsigned traceback_clues(struct span block)
{
    unsigned clues = 0;

    while (block.n > 0)
        clues |= frame_clues(next_line(&block));
    return clues;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

/* Finds a code of zerod, as in "E1001 duplicate" but not as in "CODE1001". Return: the code, or 0. */
static int our_code(struct span line)
{
    for (size_t i = 0; i + 6 < line.n; i++) {
        struct span number = {line.data + i + 1, 5};
        int64_t code;

        if (line.data[i] != 'E' || line.data[i + 5] != ' ' || (i && isalnum((unsigned char)line.data[i - 1])))
            continue;
        code = leading_number(number);
        if (code >= 1000 && code <= 9999 && diagnostic_info((enum diagnostic_code)code))
            return (int)code;
    }
    return 0;
}

static bool message_kind(struct span line, struct span tail, struct explain_message *m)
{
    if (has(line, "Expected to mark a variable ready only once"))
        m->kind = EXPLAIN_READY_ONCE;
    else if (has(line, "Expected to have finished reduction in the prior iteration"))
        m->kind = has(tail, "static_graph set to True")                   ? EXPLAIN_PRIOR_STATIC
                  : has(tail, "`find_unused_parameters=True` is enabled") ? EXPLAIN_PRIOR_FIND
                                                                          : EXPLAIN_PRIOR;
    else if (has(line, "Your training graph has changed in this iteration"))
        m->kind = EXPLAIN_GRAPH_CHANGED;
    else if (has(line, "has already been reduced") && has(tail, "Gradient computed twice for this partition"))
        m->kind = EXPLAIN_DEEPSPEED_TWICE;
    else if (has(line, "assert len(set(p.ds_id for p in"))
        m->kind = EXPLAIN_DEEPSPEED_BARE;
    else if ((m->code = our_code(line)))
        m->kind = EXPLAIN_OURS;
    else
        return false;
    return true;
}

/* DDP prints "Parameter at index 5 with name a.b has been marked"; DeepSpeed prints "The parameter 5 has", recent
 * versions with the name. */
static void read_name(struct explain_message *m, struct span tail)
{
    bool ddp = m->kind == EXPLAIN_READY_ONCE;
    struct span rest = behind(tail, ddp ? "Parameter at index " : "The parameter "), name = rest;
    const char *end;

    if (ddp || m->kind == EXPLAIN_DEEPSPEED_TWICE)
        m->index = leading_number(rest);
    if (ddp)
        name = behind(first_line(rest), " with name ");
    else if (m->kind != EXPLAIN_DEEPSPEED_TWICE || m->index >= 0)
        return;
    end = find_in(name, ddp ? " has been marked" : " has already been reduced");
    if (end)
        copy_span(m->name, sizeof(m->name), (struct span){name.data, end - name.data});
}

static void count_names(struct explain_message *m, struct span list)
{
    m->names = true;
    m->n_listed = list.n > 0;
    for (size_t i = 0; i + 1 < list.n; i++)
        m->n_listed += list.data[i] == ',' && list.data[i + 1] == ' ';
}

static void count_indices(struct explain_message *m, struct span list)
{
    int64_t expected = 0;
    bool inside = false;

    m->from_start = true;
    for (size_t i = 0; i < list.n; i++) {
        bool digit = isdigit((unsigned char)list.data[i]);

        if (digit && !inside) {
            m->n_listed++;
            m->from_start &= leading_number((struct span){list.data + i, list.n - i}) == expected++;
        }
        inside = digit;
    }
}

static void read_list(struct explain_message *m, struct span tail, int64_t *rank)
{
    struct span rest = behind(tail, "Parameters which did not receive grad for rank "), list;
    bool names = rest.n > 0;

    if (!names)
        rest = behind(tail, "Parameter indices which did not receive grad for rank ");
    if (rest.n == 0)
        return;
    if (*rank < 0 && leading_number(rest) < EXPLAIN_MAX_RANKS)
        *rank = leading_number(rest);
    list = behind(first_line(rest), ": ");
    if (find_in(list, " In addition, you can set")) /* the list is followed by advice in the same line */
        list.n = find_in(list, " In addition, you can set") - list.data;
    while (list.n && strchr(" .", list.data[list.n - 1])) {
        m->list_cut |= list.data[list.n - 1] == '.';
        list.n--;
    }
    if (names)
        count_names(m, list);
    else
        count_indices(m, list);
    copy_span(m->list, sizeof(m->list), list);
    m->list_cut |= list.n >= sizeof(m->list);
}

static bool same(const struct explain_message *a, const struct explain_message *b)
{
    return a->kind == b->kind && a->code == b->code && a->index == b->index && a->clues == b->clues &&
           strcmp(a->name, b->name) == 0 && strcmp(a->list, b->list) == 0;
}

/* Adds a message. Equal messages of several ranks become one message. Ignores further messages after EXPLAIN_MAX_FOUND.
 * */
static int messages_add(struct explain_messages *messages, struct explain_message *m, int64_t rank)
{
    struct explain_message *found = NULL;

    for (size_t i = 0; i < messages->n && !found; i++)
        if (same(&messages->items[i], m))
            found = &messages->items[i];
    if (!found && messages->n == EXPLAIN_MAX_FOUND)
        return 0;
    if (!found) {
        m->ranks = calloc(EXPLAIN_MAX_RANKS, sizeof(*m->ranks));
        if (!m->ranks)
            return -ENOMEM;
        found = &messages->items[messages->n++];
        *found = *m;
    }
    if (rank >= 0 && !found->ranks[rank]) {
        found->ranks[rank] = true;
        found->n_ranks++;
    }
    return 0;
}

static bool starts_traceback(struct span line)
{
    return has(line, "Traceback (most recent call last)");
}

/* The message's line and the following lines that belong to it, up to the next traceback. */
static struct span tail_of(struct span line, struct span rest)
{
    struct span next = {rest.data, 0};
    const char *end = rest.data;
    enum { MAX_LINES = 12 };

    for (int i = 0; i < MAX_LINES && rest.n > 0; i++) {
        next = next_line(&rest);
        if (starts_traceback(next))
            break;
        end = next.data + next.n;
    }
    return (struct span){line.data, end > line.data + line.n ? (size_t)(end - line.data) : line.n};
}

static int read_stream(struct explain_messages *messages, const struct stream *stream,
                       const struct explain_message *common)
{
    struct span rest = {strbuf_text(&stream->text), stream->text.n_bytes}, block = {rest.data, 0};
    bool chained = false;

    while (rest.n > 0) {
        struct span line = next_line(&rest), tail = tail_of(line, rest);
        struct explain_message m = {.index = -1};
        int64_t rank = stream->rank;

        /* If an exception was raised while another one was handled, both tracebacks belong to the message. */
        if (starts_traceback(line) && !chained)
            block = line;
        if (starts_traceback(line))
            chained = false;
        chained |= has(line, "The above exception was the direct cause") || has(line, "During handling of the above");
        block.n = block.data ? (size_t)(line.data + line.n - block.data) : 0;
        if (!message_kind(line, tail, &m))
            continue;
        m.clues = common->clues | traceback_clues(block);
        memcpy(m.exception, common->exception, sizeof(m.exception));
        read_name(&m, tail);
        read_list(&m, tail, &rank);
        if (messages_add(messages, &m, rank) < 0)
            return -ENOMEM;
        block = (struct span){rest.data, 0};
    }
    return 0;
}

int explain_read(struct explain_messages *messages, const char *text, size_t n_bytes)
{
    struct explain_message common = {0};
    size_t n_cut = n_bytes > EXPLAIN_MAX_BYTES ? n_bytes - EXPLAIN_MAX_BYTES : 0;
    struct streams streams;
    int r;

    *messages = (struct explain_messages){0};
    r = streams_init(&streams, (struct span){text + n_cut, n_bytes - n_cut});
    if (r < 0)
        return r;
    read_everywhere(&streams, &common);
    for (size_t i = 0; r == 0 && i < streams.n; i++)
        r = read_stream(messages, &streams.items[i], &common);
    streams_deinit(&streams);
    if (r < 0)
        explain_messages_deinit(messages);
    return r;
}

void explain_messages_deinit(struct explain_messages *messages)
{
    for (size_t i = 0; i < messages->n; i++)
        free(messages->items[i].ranks);
    messages->n = 0;
}
