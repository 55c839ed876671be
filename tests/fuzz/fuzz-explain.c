/* SPDX-License-Identifier: Apache-2.0 */

/* zerodctl explain with the output of any program. Seeds: tests/explain. */

#include <stdlib.h>

#include "client/ctl/explain.h"
#include "core/diagnosis/diagnosis.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct explain_messages messages;

    if (explain_read(&messages, (const char *)data, size) < 0)
        return 0;
    for (size_t i = 0; i < messages.n; i++) {
        struct diagnostic *d = explain_say(&messages.items[i], &messages);

        if (!d->text || !*d->text)
            abort();
        diagnostic_unref(d);
    }
    explain_messages_deinit(&messages);
    return 0;
}
