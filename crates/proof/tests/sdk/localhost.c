// Names below `localhost` are this machine, as RFC 6761 has it and as they are with libnss-myhostname: for machines where glibc
// looks them up in the DNS. Preloaded into the programs of a test.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    static const char below[] = ".localhost";
    size_t length = name ? strlen(name) : 0, tail = sizeof below - 1;
    lookup *next = (lookup *)dlsym(RTLD_NEXT, "getaddrinfo");
    if (!next) return EAI_SYSTEM;
    if (length > tail && !strcmp(name + length - tail, below)) name = "127.0.0.1";
    return next(name, service, hints, found);
}
