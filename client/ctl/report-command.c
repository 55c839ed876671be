/* SPDX-License-Identifier: Apache-2.0 */

/* The command `zerodctl report`: adds the kernel's data to the daemon's own report. */

#include "client/ctl/report-command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"

enum {
    FILE_MAX_BYTES = 64 * 1024, /* of one file of /proc; a longer file is cut */
    MAX_SEGMENTS = 256,         /* different names of shared segments */
    NAME_MAX_BYTES = 128,
};

DEFINE_CLEANUP(FILE *, fclose);

/*
 * Return: {"text": ...}; or {"error": ...} if the file cannot be read, because a report without it is better than none.
 */
static struct json_object *file_object(struct json *j, const char *path)
{
    struct json_object *o = json_new_object(j);
    _cleanup_free_ char *text = malloc(FILE_MAX_BYTES);
    _cleanup_(fclosep) FILE *file = NULL;
    size_t n;

    if (!text) {
        j->failed = true;
        return o;
    }
    file = fopen(path, "re");
    n = file ? fread(text, 1, FILE_MAX_BYTES - 1, file) : 0;
    if (!file || ferror(file)) {
        json_put_string(j, o, "error", strerror(errno));
        return o;
    }
    text[n] = '\0';
    json_put_string(j, o, "text", text);
    return o;
}

static void put_file(struct json *j, struct json_object *parent, const char *key, const char *path)
{
    json_put(j, parent, key, file_object(j, path));
}

/* ---- shared segments ----------------------------------------------------------------------------------- */

struct segment_use {
    char name[NAME_MAX_BYTES];
    uint64_t size_bytes, resident_bytes;
};

struct segment_uses {
    struct segment_use items[MAX_SEGMENTS];
    size_t n;
};

/* Finds or adds the entry of a segment. Return: NULL if there are too many segments. */
static struct segment_use *find_use(struct segment_uses *uses, const char *name)
{
    size_t i;

    for (i = 0; i < uses->n; i++)
        if (strcmp(uses->items[i].name, name) == 0)
            return &uses->items[i];
    if (uses->n == MAX_SEGMENTS)
        return NULL;
    snprintf(uses->items[uses->n].name, NAME_MAX_BYTES, "%s", name);
    return &uses->items[uses->n++];
}

/* Adds up the sizes of the memfd mappings in smaps by name. Their lines have "/memfd:NAME (deleted)". */
static void read_segments(FILE *file, struct segment_uses *uses)
{
    struct segment_use *use = NULL;
    char line[4096], name[NAME_MAX_BYTES];
    uint64_t kb;

    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "%*x-%*x %*s %*s %*s %*s /memfd:%127s", name) == 1)
            use = find_use(uses, name);
        else if (strchr("0123456789abcdef", line[0]))
            use = NULL;
        else if (use && sscanf(line, "Size: %" SCNu64, &kb) == 1)
            use->size_bytes += kb * 1024;
        else if (use && sscanf(line, "Rss: %" SCNu64, &kb) == 1)
            use->resident_bytes += kb * 1024;
    }
}

static struct json_object *segments_object(struct json *j, int64_t pid)
{
    struct json_object *o = json_new_object(j), *array, *item;
    _cleanup_free_ struct segment_uses *uses = calloc(1, sizeof(*uses));
    _cleanup_(fclosep) FILE *file = NULL;
    char path[64];
    size_t i;

    snprintf(path, sizeof(path), "/proc/%" PRId64 "/smaps", pid);
    file = fopen(path, "re");
    if (!file || !uses) {
        json_put_string(j, o, "error", strerror(errno));
        return o;
    }
    read_segments(file, uses);
    array = json_new_array(j);
    for (i = 0; i < uses->n; i++) {
        item = json_new_object(j);
        json_put_string(j, item, "name", uses->items[i].name);
        json_put_u64(j, item, "size_bytes", uses->items[i].size_bytes);
        json_put_u64(j, item, "resident_bytes", uses->items[i].resident_bytes);
        json_push(j, array, item);
    }
    json_put(j, o, "segments", array);
    return o;
}

/* ---- processes and machine ----------------------------------------------------------------------------- */

static struct json_object *process_object(struct json *j, int64_t pid)
{
    static const char *const files[] = {"status", "stat", "limits", "cgroup", "smaps_rollup", "wchan"};
    struct json_object *o = json_new_object(j);
    char path[64];
    size_t i;

    json_put_i64(j, o, "pid", pid);
    for (i = 0; i < ARRAY_SIZE(files); i++) {
        snprintf(path, sizeof(path), "/proc/%" PRId64 "/%s", pid, files[i]);
        put_file(j, o, files[i], path);
    }
    json_put(j, o, "memfd", segments_object(j, pid));
    return o;
}

static struct json_object *ranks_array(struct json *j, struct json_object *ranks)
{
    struct json_object *array = json_new_array(j);
    size_t n = json_object_is_type(ranks, json_type_array) ? json_object_array_length(ranks) : 0, i;
    int64_t pid;

    for (i = 0; i < n; i++) {
        pid = json_object_get_int64(json_object_object_get(json_object_array_get_idx(ranks, i), "pid"));
        if (pid > 0)
            json_push(j, array, process_object(j, pid));
    }
    return array;
}

static struct json_object *machine_object(struct json *j)
{
    static const struct {
        const char *key, *path;
    } files[] = {
        {"os_release", "/etc/os-release"},
        {"meminfo", "/proc/meminfo"},
        {"cpuinfo", "/proc/cpuinfo"},
        {"loadavg", "/proc/loadavg"},
        {"hugepages_shmem", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"},
        {"hugepages", "/sys/kernel/mm/transparent_hugepage/enabled"},
        {"overcommit_memory", "/proc/sys/vm/overcommit_memory"},
        {"max_map_count", "/proc/sys/vm/max_map_count"},
        {"pressure_memory", "/proc/pressure/memory"},
        {"cgroup_memory_max", "/sys/fs/cgroup/memory.max"},
        {"cgroup_memory_current", "/sys/fs/cgroup/memory.current"},
    };
    struct json_object *o = json_new_object(j);
    struct utsname name;
    size_t i;

    if (uname(&name) == 0) {
        json_put_string(j, o, "kernel", name.release);
        json_put_string(j, o, "architecture", name.machine);
    }
    for (i = 0; i < ARRAY_SIZE(files); i++)
        put_file(j, o, files[i].key, files[i].path);
    return o;
}

/* ---- the report ---------------------------------------------------------------------------------------- */

static void print_time(char *dst, size_t size)
{
    time_t now = time(NULL);
    struct tm tm;

    strftime(dst, size, "%Y%m%dT%H%M%SZ", gmtime_r(&now, &tm));
}

char *report_text(struct json_object *answer)
{
    int64_t pid = json_object_get_int64(json_object_object_get(json_object_object_get(answer, "status"), "pid"));
    struct json j = {};
    struct json_object *o = json_new_object(&j);
    char when[32];

    print_time(when, sizeof(when));
    json_put_u64(&j, o, "schema_version", 1);
    json_put_string(&j, o, "made", when);
    json_put_string(&j, o, "zerodctl_version", ZEROD_VERSION);
    json_put(&j, o, "machine", machine_object(&j));
    json_put(&j, o, "process", process_object(&j, pid));
    json_put(&j, o, "rank_processes", ranks_array(&j, json_object_object_get(answer, "ranks")));
    json_put(&j, o, "daemon", answer);
    return json_text(&j, o);
}

char *report_name(struct json_object *answer)
{
    struct json_object *job = json_object_object_get(json_object_object_get(answer, "status"), "job");
    const char *word = job ? json_object_get_string(job) : "job";
    char when[32], *name;

    print_time(when, sizeof(when));
    /* A name from the daemon must not lead out of this folder. */
    if (!*word || strchr(word, '/'))
        word = "job";
    return asprintf(&name, "zerod-report-%s-%s.json", word, when) < 0 ? NULL : name;
}
