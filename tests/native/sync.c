// Stands before the C library: says which files are synchronised and which are renamed, in the order in which that is
// done. LD_PRELOAD has it loaded first; SYNC_LOG names the file that it writes to.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void say(const char* what, const char* path) {
  const char* name = getenv("SYNC_LOG");
  FILE* log = name ? fopen(name, "a") : NULL;
  if (!log) return;
  const char* base = strrchr(path, '/');
  fprintf(log, "%s %s\n", what, base ? base + 1 : path);
  fclose(log);
}

int fsync(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  say("fsync", path);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int rename(const char* from, const char* to) {
  say("rename", from);
  return ((int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename"))(from, to);
}
