/* SPDX-License-Identifier: Apache-2.0 */

/* Diagnostics of other nodes, and of the engines that move bytes between nodes: E1501, E1502, E1503. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/print-number.h"
#include "core/diagnosis/cause-common.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis-build.h"

struct diagnostic *cause_node_silent(const struct evidence_node *e)
{
    char title[64];
    struct strbuf on = {0}, cause = {0};
    struct diagnostic *d;

    snprintf(title, sizeof(title), "node %u is not reached", e->node);
    d = cause_new(&e->at, E_NODE_LOST, title);
    diagnostic_warn(d);
    cause_foreign_field(d, "waits", e->waits);
    strbuf_add(&on, "node %u at ", e->node);
    strbuf_add_foreign(&on, e->address);
    if (e->n_ranks > 1)
        strbuf_add(&on, ", ranks %u to %u", e->first_rank, e->first_rank + e->n_ranks - 1);
    else
        strbuf_add(&on, ", rank %u", e->first_rank);
    diagnostic_field_take(d, "on", &on);
    strbuf_add(&cause, "the link to its daemon is down: ");
    strbuf_add_foreign(&cause, e->why);
    diagnostic_field_take(d, "cause", &cause);
    diagnostic_field(d, "fix",
                     "see that its machine, its daemon and the network are up: the link comes back by itself");
    diagnostic_field(d, "does not help", "the training program, the gradients; a longer stall_timeout");
    diagnostic_field(
        d, "state",
        "nothing is lost as long as its daemon lives, or systemd or zerodrun keep what it holds: the step goes on\n"
        "when the link is back, and no node takes a step without the others");
    return diagnostic_finish(d);
}

struct diagnostic *cause_nodes_differ(const struct evidence_node *e)
{
    struct diagnostic *d = cause_new(&e->at, E_NODE_LOST, "nodes are configured differently, job not formed");
    struct strbuf on = {0};

    strbuf_add(&on, "node %u at ", e->node);
    strbuf_add_foreign(&on, e->address);
    strbuf_add(&on, " (there); node %u (here) has compared them", e->here);
    diagnostic_field_take(d, "on", &on);
    cause_foreign_field(d, "cause", e->why);
    diagnostic_field(d, "fix",
                     "the same value on every node (zerod --print-config shows them), and that daemon restarted");
    diagnostic_field(d, "does not help", "the training program; the network: the two daemons talk to each other");
    diagnostic_field(d, "state", "no job was formed and no memory is held: declare again on every rank");
    return diagnostic_finish(d);
}

struct diagnostic *cause_engine(const struct evidence_node *e)
{
    struct diagnostic *d = cause_new(&e->at, E_ENGINE, "engine failed, replaced");

    diagnostic_warn(d);
    diagnostic_field(d, "waits", "traffic between nodes, for the engines of generation %" PRIu32 " to connect",
                     e->generation);
    cause_foreign_field(d, "cause", e->why);
    diagnostic_field(d, "fix", "none, if it happens once: engines are replaced on all nodes together");
    diagnostic_field(
        d, "or", "if it repeats, look at the network between the nodes and at the host of each address in world.nodes");
    diagnostic_field(d, "does not help",
                     "the training program; its gradients: they are kept until they have arrived everywhere");
    diagnostic_field(d, "state",
                     "messages that had not arrived everywhere are sent again, and nothing is counted twice");
    return diagnostic_finish(d);
}

struct diagnostic *cause_device(const struct evidence_node *e)
{
    struct diagnostic *d = cause_new(&e->at, E_ENGINE, "engine of the GPUs failed, replaced");

    diagnostic_warn(d);
    diagnostic_field(d, "waits", "work for the GPUs, for the engine of generation %" PRIu32, e->generation);
    cause_foreign_field(d, "cause", e->why);
    diagnostic_field(d, "fix", "none, if it happens once: another engine goes on with what is in the GPUs' memory");
    diagnostic_field(d, "or", "if it repeats, look at the GPUs: nvidia-smi, and Xid lines in the kernel's log");
    diagnostic_field(d, "does not help", "the training program; its gradients: they are kept until they are added up");
    diagnostic_field(d, "state", "the work that was not done is done again, and nothing is counted twice");
    return diagnostic_finish(d);
}

struct diagnostic *cause_device_unformed(const struct evidence_device_unformed *e)
{
    struct diagnostic *d = cause_new(&e->at, E_ENGINE, "job not formed: no engine for the GPUs");
    char gpu_text[PRINT_SIZE], host_text[PRINT_SIZE];

    diagnostic_field(d, "asked", "about %s of each GPU, beside what the training program needs",
                     print_bytes(gpu_text, e->gpu_bytes));
    cause_foreign_field(d, "cause", e->why);
    diagnostic_field(
        d, "fix",
        "as the cause says; if it says nothing, make the GPUs reachable for zerod (nvidia-smi as its user;\n"
        "CUDA_VISIBLE_DEVICES; one GPU for each rank of the node), or free their memory");
    if (e->offloaded_gpu_bytes > 0)
        diagnostic_field(d, "or",
                         "zero_optimization.offload_optimizer.device: cpu, which needs about %s of each GPU,\n"
                         "and %s of the host's memory",
                         print_bytes(gpu_text, e->offloaded_gpu_bytes),
                         print_bytes(host_text, e->offloaded_host_bytes));
    diagnostic_field(d, "or", "device: cpu, with the state in host memory");
    diagnostic_field(d, "does not help", "the model, the training program, the other ranks");
    diagnostic_field(d, "state", "no job was formed and no memory is held: declare again on every rank");
    return diagnostic_finish(d);
}

struct diagnostic *cause_node_reborn(const struct evidence_node *e)
{
    struct diagnostic *d = cause_new(&e->at, E_GENERATION, "a node came back as another daemon, job ended");

    diagnostic_field(d, "what", "the partitions of the ranks of that node: masters, moments, gradients");
    cause_foreign_field(d, "cause", e->why);
    diagnostic_field(d, "fix", "start the trainers of all nodes again: the run begins anew, from what they have saved");
    diagnostic_field(d, "or", "run each daemon under systemd or zerodrun, which keep what it holds when it dies");
    diagnostic_field(d, "does not help", "the gradients; the ranks and the daemons of the other nodes");
    diagnostic_field(d, "state",
                     "the job has ended on every node, because none can go on with its part of the state alone;\n"
                     "the daemons run on and wait for ranks");
    return diagnostic_finish(d);
}

struct diagnostic *cause_refused_elsewhere(const struct evidence_at *at, unsigned code, const char *text)
{
    struct diagnostic *d = cause_new(at, (enum diagnostic_code)code, "job not formed: another node refuses it");
    struct strbuf buf = {0};
    size_t n = strlen(text);

    while (n > 0 && text[n - 1] == '\n')
        n--;
    strbuf_add_bytes(&buf, text, n);
    diagnostic_field_take(d, "cause", &buf);
    diagnostic_field(d, "fix", "apply the fix that is given above, on that node");
    diagnostic_field(d, "does not help", "this node");
    diagnostic_field(d, "state", "no job was formed and no memory is held: declare again on every rank");
    return diagnostic_finish(d);
}

struct diagnostic *cause_runs_differ(const struct evidence_at *at, const char *who)
{
    struct diagnostic *d = cause_new(at, E_OTHER_RUN, "nodes of two runs, job not formed");

    cause_foreign_field(d, "cause", who);
    diagnostic_field(d, "fix", "one run id on all nodes: zerodrun --run-id, or ZEROD_RUN_ID");
    diagnostic_field(d, "or", "end the ranks that are left over from another run");
    diagnostic_field(d, "does not help", "the model, the number of ranks, permissions, the network");
    diagnostic_field(d, "state", "no job was formed and no memory is held: declare again on every rank");
    return diagnostic_finish(d);
}
