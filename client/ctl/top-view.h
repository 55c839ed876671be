/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The screens of `zerodctl top`: the job, one diagnostic, and help. They fill stdscr of ncurses. If a section does not
 * fit, its beginning is shown. Only the table of ranks, diagnostics and the help text scroll.
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
    int scroll;     /* first row of the scrolling part; view_draw() corrects it */
    int n_page;     /* rows per page; set by view_draw() */
    unsigned older; /* number of diagnostics newer than the shown one */
};

/* Draws the screen on stdscr; the caller refreshes it. now_ms: control_clock_ms(). */
void view_draw(struct view *view, const struct feed *feed, uint64_t now_ms);
