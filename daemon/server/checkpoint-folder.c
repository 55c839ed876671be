/* SPDX-License-Identifier: Apache-2.0 */

/* Checks the checkpoint folder when the daemon starts. */

#include "daemon/server/checkpoint-folder.h"

#include <assert.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/acl.h"
#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/write.h"
#include "daemon/job/job.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"

/*
 * Grants the readers access to the folder, by an access control list that new files and subfolders inherit. The
 * folder's group and other users get no access, because only the configuration decides who may read.
 */
static int give_to_readers(const char *dir, const struct accounts *readers)
{
    struct acl acl = {.mode = S_IRWXU, .named = S_IROTH | S_IXOTH};
    int r;

    if (readers->n_gids == 0)
        return 0;
    acl_add_groups(&acl, readers->gids, readers->n_gids);
    r = acl_write(&acl, dir, true);
    return r < 0 ? r : acl_write(&acl, dir, false);
}

/*
 * Checks that the daemon can use the folder. A missing folder is no error if the first save can make it. Return: 0 or
 * -errno.
 */
static int try_access(const char *dir)
{
    _cleanup_free_ char *copy = strdup(dir);

    if (access(dir, R_OK | W_OK | X_OK) == 0)
        return 0;
    return errno == ENOENT && copy && access(dirname(copy), W_OK | X_OK) == 0 ? 0 : -errno;
}

static void try_folder(uv_work_t *work)
{
    struct checkpoint_folder *folder = container_of(work, struct checkpoint_folder, work);
    const char *dir = folder->config->dir;

    folder->tried = folder->readers.n_gids > 0 ? checkpoint_make_dir(&disk_system, dir) : 0;
    if (folder->tried == 0)
        folder->tried = try_access(dir);
    if (folder->tried == 0)
        folder->given = give_to_readers(dir, &folder->readers);
}

static void say_what_is_wrong(const struct checkpoint_folder *folder)
{
    const struct evidence_at nowhere = {.rank = -1, .step = -1, .micro_batch = -1};
    const char *dir = folder->config->dir;
    char why[128];

    if (folder->tried < 0) {
        snprintf(why, sizeof(why), "the daemon cannot write into that folder: %s", strerror(-folder->tried));
        job_keep(folder->job, cause_not_saved(&nowhere, dir, why));
    }
    if (folder->given < 0)
        log_error("checkpoint.allow_groups: they cannot read what is written to %s: %s. The daemon's user must own the "
                  "folder, "
                  "and its file system needs access control lists (docs/checkpoints.md has a way without)",
                  dir, strerror(-folder->given));
}

static void on_tried(uv_work_t *work, int status)
{
    struct checkpoint_folder *folder = container_of(work, struct checkpoint_folder, work);

    if (status == 0 && folder->job)
        say_what_is_wrong(folder);
    accounts_deinit(&folder->readers);
}

int checkpoint_folder_try(struct checkpoint_folder *folder, struct job *job, char *why, size_t why_size)
{
    int r;

    assert(!folder->job);
    folder->config = &job->config->checkpoint;
    folder->job = job;
    if (!folder->config->dir)
        return 0;
    r = accounts_groups(&folder->readers, &folder->config->allow_groups, "checkpoint.allow_groups", why, why_size);
    if (r == 0)
        r = uv_queue_work(job->ops.loop, &folder->work, try_folder, on_tried);
    if (r < 0)
        accounts_deinit(&folder->readers);
    return r;
}

void checkpoint_folder_leave(struct checkpoint_folder *folder)
{
    folder->job = NULL;
}
