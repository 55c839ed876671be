/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The terminal of `zerodctl top`: its size, keys and signals. An epoll descriptor is readable when a key or a signal is
 * pending, and is served also during a poll of the daemon. Signals are blocked and read from a descriptor, so no
 * handler runs between two calls of ncurses, and the terminal is restored before a signal ends the process.
 */

#include "client/ctl/top.h"

#include <errno.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sysexits.h>
#include <unistd.h>

#include <ncurses.h>
#include <term.h>

#include "client/ctl/ask.h"
#include "client/control/control.h"
#include "client/ctl/top-feed.h"
#include "client/ctl/top-pen.h"
#include "client/ctl/top-view.h"
#include "core/base/base.h"

enum {
    PERIOD_MS = 500,
    MIN_COLUMNS = 2, /* with a single column ncurses 6.4 reads beyond its memory */
    ESCAPE_MS = 25,  /* picked: the longest time between ESC and the bytes of a key's sequence after it */
};

static const int caught[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH};

struct top {
    struct feed feed;
    struct view view;
    struct control_idle idle; /* reads keys and signals; idle.fd is the epoll descriptor */
    sigset_t mask;            /* the original mask */
    int signal_fd;
    SCREEN *screen; /* NULL: the terminal is unchanged */
    bool quits;
    int signal; /* the signal that ends the process; 0: none */
};

/* ---- requirements -------------------------------------------------------------------------------------- */

#define INSTEAD "\"zerodctl status\" shows the job once, \"zerodctl status --watch\" again and again"

/* Return: 0, or EX_USAGE after an error message. */
static int check_terminal(void)
{
    const char *type = getenv("TERM");
    const char *move;
    int error;

    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
        return ctl_fail("top needs a terminal as standard input and output: " INSTEAD, EX_USAGE);
    if (!type || !*type)
        return ctl_fail("top needs to know the terminal's type, and TERM is not set: " INSTEAD, EX_USAGE);
    if (setupterm(NULL, STDOUT_FILENO, &error) == ERR) {
        fprintf(stderr, "zerodctl: top knows no terminal of the type %s (TERM): set another one; " INSTEAD "\n", type);
        return EX_USAGE;
    }
    move = tigetstr("cup");
    (void)del_curterm(cur_term);
    if (!move || move == (const char *)-1) {
        fprintf(stderr, "zerodctl: top needs a terminal whose cursor moves, not %s (TERM): " INSTEAD "\n", type);
        return EX_USAGE;
    }
    return 0;
}

/* ---- keys and signals ---------------------------------------------------------------------------------- */

static void show_screen(struct top *top, enum view_screen screen)
{
    top->view.screen = top->view.screen == screen ? VIEW_JOB : screen;
    top->view.scroll = 0;
    top->view.older = 0;
}

static void show_older(struct top *top, int n)
{
    if (top->view.screen != VIEW_DIAGNOSTIC || (n < 0 && top->view.older == 0))
        return;
    top->view.older += (unsigned)n;
    top->view.scroll = 0;
}

static void obey_key(struct top *top, int key)
{
    struct view *view = &top->view;

    switch (key) {
    case 'q':
        top->quits = true;
        break;
    case 'd':
        show_screen(top, VIEW_DIAGNOSTIC);
        break;
    case '?':
    case 'h':
        show_screen(top, VIEW_HELP);
        break;
    case '\033':
        show_screen(top, view->screen);
        break;
    case KEY_LEFT:
    case KEY_RIGHT:
        show_older(top, key == KEY_LEFT ? 1 : -1);
        break;
    case KEY_UP:
    case 'k':
        view->scroll--;
        break;
    case KEY_DOWN:
    case 'j':
        view->scroll++;
        break;
    case KEY_PPAGE:
        view->scroll -= view->n_page;
        break;
    case KEY_NPAGE:
    case ' ':
        view->scroll += view->n_page;
        break;
    case KEY_HOME:
        view->scroll = 0;
        break;
    case KEY_END:
        view->scroll = INT16_MAX;
        break;
    default:
        break;
    }
}

static void read_signals(struct top *top)
{
    struct signalfd_siginfo info;

    while (read(top->signal_fd, &info, sizeof(info)) == sizeof(info)) {
        if (info.ssi_signo != SIGWINCH) /* SIGWINCH needs only the redrawing that follows */
            top->signal = (int)info.ssi_signo;
    }
}

/*
 * Reads all keys. Ends top if the terminal is closed, because a closed terminal stays readable, and its SIGHUP may come
 * later.
 */
static void read_keys(struct top *top)
{
    struct pollfd pollfd = {.fd = STDIN_FILENO, .events = POLLIN};
    int key;

    while ((key = getch()) != ERR)
        obey_key(top, key);
    if (poll(&pollfd, 1, 0) > 0 && (pollfd.revents & (POLLHUP | POLLERR)))
        top->signal = SIGHUP;
}

/* Adopts the terminal's size, because a stopped process gets no signal about a new size. */
static void follow_size(void)
{
    struct winsize size;

    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0)
        (void)resizeterm(size.ws_row, MAX(size.ws_col, MIN_COLUMNS));
}

static void draw(struct top *top)
{
    follow_size();
    view_draw(&top->view, &top->feed, control_clock_ms());
    (void)refresh();
}

/* Reads signals and keys, and redraws. Return: not 0 if top ends. */
static int on_event(void *userdata)
{
    struct top *top = userdata;

    read_signals(top);
    read_keys(top);
    if (!top->quits && !top->signal)
        draw(top);
    return top->quits || top->signal;
}

/* Return: not 0 if top ends. */
static int wait_until(struct top *top, uint64_t until_ms)
{
    struct pollfd pollfd = {.fd = top->idle.fd, .events = POLLIN};
    uint64_t now;

    while ((now = control_clock_ms()) < until_ms)
        if (poll(&pollfd, 1, (int)(until_ms - now)) > 0 && on_event(top) != 0)
            return 1;
    return 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static int watch_descriptor(int epoll_fd, int fd)
{
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN});
}

static int start_events(struct top *top)
{
    sigset_t set;

    (void)sigemptyset(&set);
    for (size_t i = 0; i < ARRAY_SIZE(caught); i++)
        (void)sigaddset(&set, caught[i]);
    if (sigprocmask(SIG_BLOCK, &set, &top->mask) < 0)
        return -errno;
    top->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    top->idle = (struct control_idle){.fd = epoll_create1(EPOLL_CLOEXEC), .call = on_event, .userdata = top};
    if (top->signal_fd < 0 || top->idle.fd < 0 || watch_descriptor(top->idle.fd, top->signal_fd) < 0 ||
        watch_descriptor(top->idle.fd, STDIN_FILENO) < 0)
        return -errno;
    return 0;
}

/* Sets the user's locale; UTF-8 if that locale is not installed. */
static void start_locale(void)
{
    if (!setlocale(LC_CTYPE, ""))
        (void)setlocale(LC_CTYPE, "C.UTF-8");
}

static int start_screen(struct top *top)
{
    start_locale();
    use_tioctl(TRUE); /* the size follows the terminal, not the variables LINES and COLUMNS */
    top->screen = newterm(NULL, stdout, stdin);
    if (!top->screen)
        return ctl_fail("the terminal cannot be used: " INSTEAD, EX_OSERR);
    pen_start_colors();
    (void)cbreak();
    (void)noecho();
    (void)curs_set(0);
    (void)keypad(stdscr, TRUE);
    (void)nodelay(stdscr, TRUE);
    (void)set_escdelay(ESCAPE_MS);
    return 0;
}

static void stop_screen(struct top *top)
{
    if (!top->screen)
        return;
    (void)endwin();
    delscreen(steal_ptr(top->screen));
}

/* Ends the process by the signal, so that the shell sees the signal. */
static void end_by_signal(struct top *top)
{
    (void)signal(top->signal, SIG_DFL);
    (void)raise(top->signal);
    (void)sigprocmask(SIG_SETMASK, &top->mask, NULL);
}

static int run_top(struct top *top)
{
    uint64_t began_ms;
    int r = start_events(top);

    if (r < 0)
        return ctl_fail(strerror(-r), EX_OSERR);
    r = start_screen(top);
    if (r != 0)
        return r;
    top->feed.idle = &top->idle;
    do {
        began_ms = control_clock_ms();
        draw(top);
        if (wait_until(top, began_ms + PERIOD_MS) != 0)
            break;
        (void)feed_look(&top->feed);
    } while (!top->quits && !top->signal);
    return 0;
}

int top_command(int argc, char **argv, const char *socket, bool json)
{
    struct top top = {.feed.socket = socket, .signal_fd = -1, .idle.fd = -1};
    int r;

    if (json || argc > 1)
        return ctl_fail(json ? "top shows a screen, not JSON: zerodctl --json status has what it shows"
                             : "top takes no arguments",
                        EX_USAGE);
    r = check_terminal();
    if (r != 0)
        return r;
    r = feed_look(&top.feed);
    r = r != 0 ? ctl_fail(top.feed.error, r) : run_top(&top);
    stop_screen(&top);
    closep(&top.signal_fd);
    closep(&top.idle.fd);
    feed_deinit(&top.feed);
    if (top.signal)
        end_by_signal(&top);
    return r;
}
