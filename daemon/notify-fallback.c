/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/notify.h"

void notify_state(const char *state)
{
    (void)state;
}

uint64_t notify_watchdog_us(void)
{
    return 0;
}

int notify_listen_fd(void)
{
    return -1;
}

bool notify_journal(const struct notify_entry *entry)
{
    (void)entry;
    return false;
}
