// load LIBRARY...: opens each, with every symbol resolved at once.
#include <dlfcn.h>

#include <cstdio>

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    if (!dlopen(names[i], RTLD_NOW | RTLD_GLOBAL)) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
  }
  return 0;
}
