/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Acts as a daemon that puts memory into the descriptor store: kept-daemon --config FILE [--socket PATH]. FILE names
 * the socket, as zerodrun's configurations do. The program prints the descriptors of its predecessor, adds a line to
 * the kept memory, and executes the bytes that clients send:
 *
 *     p  prints the name of each kept descriptor       m  puts 100 more, and waits until all are stored
 *     f  forgets the memory                            k  puts one more and kills itself at once
 *     7  exits with 78                                 0  exits with 0
 */

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sysexits.h>

#include "core/base/base.h"
#include "core/base/keep.h"

enum { CONFIRM_MS = 30 * 1000 };

static char path[108];

static void stop(int number)
{
    (void)number;
    unlink(path);
    _exit(0);
}

/* Reads the socket's path from a line like "  socket: '/tmp/x'", or "listen: {socket: /tmp/x}". */
static bool read_path(const char *config)
{
    FILE *file = fopen(config, "re");
    char line[512], *at;
    bool found = false;

    while (file && !found && fgets(line, sizeof(line), file))
        if ((at = strstr(line, "socket: ")))
            found = sscanf(at + strlen("socket: "), "%*[']%107[^'\n]", path) == 1 ||
                    sscanf(at + strlen("socket: "), "%107[^,}\n]", path) == 1;
    if (file)
        fclose(file);
    return found;
}

static int open_socket(void)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = keep_listen_fd();

    if (fd >= 0)
        return fd;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || listen(fd, 16) < 0)
        exit(EX_UNAVAILABLE);
    keep_put("listen", fd);
    return fd;
}

static void put_memory(const char *name, const char *text)
{
    int fd = memfd_create(name, MFD_CLOEXEC);

    if (fd < 0 || write(fd, text, strlen(text)) < 0 || keep_put(name, fd) < 0)
        perror(name);
    close(fd);
}

/* Opens its predecessor's memory or creates it, and adds a line with its own process id. */
static int open_memory(void)
{
    int fd = keep_take("state");
    bool is_new = fd < 0;

    if (is_new)
        fd = memfd_create("state", MFD_CLOEXEC);
    if (fd < 0 || lseek(fd, 0, SEEK_END) < 0 || dprintf(fd, "%d\n", (int)getpid()) < 0)
        exit(EX_OSERR);
    if (is_new)
        keep_put("state", fd);
    return fd;
}

static void show(int memory)
{
    char text[512] = "";
    struct stat st;
    size_t n = 0;

    fstat(memory, &st);
    if (pread(memory, text, sizeof(text) - 1, 0) < 0)
        perror("state");
    for (char *at = text; (at = strchr(at, '\n')); *at = ' ')
        ;
    while (keep_passed(n))
        n++;
    printf("inode %lu, pids %s, %zu others\n", (unsigned long)st.st_ino, text, n);
}

static void obey(char word)
{
    char name[32];

    for (size_t i = 0; word == 'p' && keep_passed(i); i++)
        printf("kept %s\n", keep_passed(i)->name);
    for (unsigned i = 0; word == 'm' && i < 100; i++) {
        snprintf(name, sizeof(name), "more.%u", i);
        put_memory(name, name);
    }
    if (word == 'f')
        keep_forget("state");
    if (word == 'k') {
        put_memory("last", "words");
        kill(getpid(), SIGKILL);
    }
    if (word == '7' || word == '0')
        exit(word == '7' ? EX_CONFIG : EX_OK);
    printf("did %c, confirmed %d\n", word, keep_confirm(CONFIRM_MS));
}

int main(int argc, char **argv)
{
    int listening, memory;

    setlinebuf(stdout);
    if (argc < 3 || !read_path(argv[2]) || keep_init() < 0)
        return EX_USAGE;
    signal(SIGINT, stop);
    memory = open_memory();
    listening = open_socket();
    printf("confirmed %d\n", keep_confirm(CONFIRM_MS));
    show(memory);
    for (;;) {
        int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        char word;

        if (fd >= 0 && recv(fd, &word, 1, 0) == 1)
            obey(word);
        close(fd);
    }
}
