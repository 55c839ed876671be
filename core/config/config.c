/* SPDX-License-Identifier: Apache-2.0 */

#include "core/config/config.h"

#include "core/base/base.h"
#include "core/config/config-read.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

/* The build says which engines it has; the build files of a later engine set these. */
#ifndef ZEROD_HAVE_GLOO
#define ZEROD_HAVE_GLOO false
#endif
#ifndef ZEROD_HAVE_NCCL
#define ZEROD_HAVE_NCCL false
#endif

const struct config_build *config_build_own(void)
{
    static const struct config_build own = {.have_gloo = ZEROD_HAVE_GLOO, .have_nccl = ZEROD_HAVE_NCCL};

    return &own;
}

void config_free(struct config *config)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    if (!config)
        return;
    for (size_t i = 0; i < n_keys; i++) {
        if (keys[i].kind == CONFIG_OURS && !strstr(keys[i].path, "[]"))
            config_value_deinit(&keys[i], config);
    }
    free(config->file);
    free(config->origins);
    free(config);
}

DEFINE_CLEANUP(struct config *, config_free);

bool config_offloads(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config->zero.offload_optimizer == CONFIG_OFFLOAD_CPU;
}

bool config_partitions_all(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config->zero.stage == 3 && !config_offloads(config);
}

unsigned config_local_ranks(const struct config *config)
{
    if (config->world.nodes.n_items == 0)
        return config->world.size;
    return config->world.nodes.items[config->world.node].ranks;
}

const char *config_optimizer_name(const struct config_optimizer *optimizer)
{
    static const char *const names[N_OPTIMIZERS] = {
        [OPTIMIZER_ADAMW] = "AdamW", [OPTIMIZER_ADAM] = "Adam",       [OPTIMIZER_SGD] = "SGD",
        [OPTIMIZER_LION] = "Lion",   [OPTIMIZER_ADAGRAD] = "Adagrad",
    };

    return names[optimizer->type == OPTIMIZER_ADAM && optimizer->hyper.adam_w_mode ? OPTIMIZER_ADAMW : optimizer->type];
}

unsigned config_first_rank_of(const struct config *config, unsigned node)
{
    unsigned first = 0;

    for (unsigned i = 0; i < node && i < config->world.nodes.n_items; i++)
        first += config->world.nodes.items[i].ranks;
    return first;
}

unsigned config_first_rank(const struct config *config)
{
    return config_first_rank_of(config, config->world.node);
}

int config_load_string(struct config **out, const struct config_source *source, struct config_problems *problems)
{
    _cleanup_(config_freep) struct config *config = calloc(1, sizeof(*config));
    int r;

    *out = NULL;
    if (!config)
        return -ENOMEM;
    r = config_read(config, source, problems);
    if (r)
        return r;
    *out = steal_ptr(config);
    return 0;
}

/* Reads one byte more than a file may have, so that the next step can say that it is too long. */
static int read_file(const char *path, char **text, size_t *n_bytes)
{
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    _cleanup_free_ char *buffer = NULL;
    struct stat st;
    size_t n = 0;

    if (fd < 0 || fstat(fd, &st) < 0)
        return -errno;
    if (S_ISDIR(st.st_mode))
        return -EISDIR;
    buffer = malloc(CONFIG_MAX_BYTES + 1);
    if (!buffer)
        return -ENOMEM;
    while (n < CONFIG_MAX_BYTES + 1) {
        ssize_t got = read(fd, buffer + n, CONFIG_MAX_BYTES + 1 - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        n += (size_t)got;
    }
    *text = steal_ptr(buffer);
    *n_bytes = n;
    return 0;
}

int config_load(struct config **out, const char *path, struct config_problems *problems)
{
    _cleanup_free_ char *text = NULL;
    struct config_source source = {.text = {.name = path}};
    struct config_spot nowhere = {0};
    int r;

    *out = NULL;
    r = read_file(path, &text, &source.text.n_bytes);
    if (r == -ENOMEM)
        return r;
    if (r < 0) {
        config_problems_add(problems, &source.text, &nowhere, NULL, "cannot be read: %s", strerror(-r));
        return problems->r < 0 ? problems->r : CONFIG_E_INVALID;
    }
    source.text.text = text;
    return config_load_string(out, &source, problems);
}
