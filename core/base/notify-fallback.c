/* SPDX-License-Identifier: Apache-2.0 */

/* notify.h without libsystemd: the service manager gets the state; there is no watchdog and no journal. */

#include "core/base/notify.h"

#include <stddef.h>

#include "core/base/keep.h"

void notify_state(const char *state)
{
    keep_tell(state);
}

uint64_t notify_watchdog_us(void)
{
    return 0;
}

struct notify_message *notify_message_new(const struct notify_entry *entry)
{
    (void)entry;
    return NULL;
}

bool notify_message_send(const struct notify_message *message)
{
    (void)message;
    return false;
}

void notify_message_free(struct notify_message *message)
{
    (void)message;
}
