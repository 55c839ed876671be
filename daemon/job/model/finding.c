/* SPDX-License-Identifier: Apache-2.0 */

/* The list of findings, to which the file of each kind adds. */

#include "daemon/job/model/finding.h"

#include <assert.h>
#include <stddef.h>

struct finding *findings_add(struct findings *findings, enum finding_kind kind)
{
    struct finding *finding = findings->n < FINDINGS_MAX ? &findings->list[findings->n++] : NULL;

    assert(findings->n <= FINDINGS_MAX);
    if (finding)
        *finding = (struct finding){.kind = kind, .rank = -1, .param = -1};
    return finding;
}
