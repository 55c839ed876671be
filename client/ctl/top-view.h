/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The screens of `zerodctl top`, drawn on stdscr of ncurses in the size that it has: the job, one diagnostic, and help.
 * Sections that do not fit show their beginning; the table of ranks and texts scroll.
 */

#include <stdbool.h>
#include <stdint.h>

struct feed;

enum view_screen {
    VIEW_JOB,
    VIEW_DIAGNOSTIC,
    VIEW_HELP,
};

struct view {
    enum view_screen screen;
    int scroll;     /* first row of what scrolls; view_draw() corrects it */
    int n_page;     /* rows by which a page scrolls; set by view_draw() */
    unsigned older; /* diagnostics that are newer than the one shown */
};

/* now_ms: control_clock_ms(). Writes to stdscr; the caller refreshes. */
void view_draw(struct view *view, const struct feed *feed, uint64_t now_ms);
