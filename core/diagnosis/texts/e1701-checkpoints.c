/* SPDX-License-Identifier: Apache-2.0 */

/* Diagnostics of checkpoints: E1701, E1702. */

#include "core/diagnosis/cause-common.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"

struct diagnostic *cause_not_saved(const struct evidence_at *at, const char *dir, const char *why)
{
    struct diagnostic *d = cause_new(at, E_NOT_SAVED, NULL);

    diagnostic_warn(d);
    if (dir)
        diagnostic_field(d, "what", "checkpoint in %s", dir);
    diagnostic_field(d, "cause", "%s", why);
    if (dir) {
        diagnostic_field(d, "fix",
                         "free space there, or let the daemon's user write there; the next save tries again\n"
                         "(zerodctl checkpoint save does it at once)");
        diagnostic_field(d, "or",
                         "ReadWritePaths=%s   (in a drop-in of its unit, whose sandbox has only /var/lib/zerod)", dir);
    } else {
        diagnostic_field(d, "fix", "name a folder in the configuration: checkpoint: {dir: PATH}");
    }
    diagnostic_field(d, "does not help", "the trainers; the gradients");
    diagnostic_field(d, "state", "the daemon and the job go on; checkpoints that were whole stay whole");
    return diagnostic_finish(d);
}

struct diagnostic *cause_no_folder(const struct evidence_at *at, const char *dir, const char *why)
{
    struct diagnostic *d = cause_new(at, E_NOT_LOADED, NULL);

    diagnostic_field(d, "what", "%s, where checkpoints are written and looked for", dir);
    diagnostic_field(d, "cause", "%s", why);
    diagnostic_field(d, "fix",
                     "name a folder that the daemon's user can read and write: checkpoint: {dir: PATH}\n"
                     "(it is made if its parent exists)");
    diagnostic_field(d, "does not help", "another program; checkpoint.load: nothing could be written there either");
    diagnostic_field(d, "state", "no job was formed, and nothing was changed there");
    return diagnostic_finish(d);
}

struct diagnostic *cause_not_loaded(const struct evidence_at *at, const char *path, const char *why)
{
    struct diagnostic *d = cause_new(at, E_NOT_LOADED, NULL);

    diagnostic_field(d, "what", "%s", path);
    diagnostic_field(d, "cause", "%s", why);
    diagnostic_field(d, "fix",
                     "start the program that the checkpoint belongs to, or name another checkpoint: checkpoint.load\n"
                     "(zerodctl checkpoint list shows them)");
    diagnostic_field(d, "or", "checkpoint.load: never   (begins anew, with the program's initial weights)");
    diagnostic_field(d, "does not help", "the number of ranks, the stage, the size of buckets: they may differ");
    diagnostic_field(d, "state", "no job was formed, and the checkpoint is unchanged");
    return diagnostic_finish(d);
}
