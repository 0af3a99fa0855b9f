// NVRTC's functions by name: where the library is found, and one compilation.
#include "nvrtc.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>

namespace factorlayer::cuda {
namespace {

using NvrtcProgram = void*;

struct Library {
  const char* (*get_error_string)(int error);
  int (*get_version)(int* major, int* minor);
  int (*create)(NvrtcProgram* program, const char* source, const char* name, int headers, const char* const* texts,
                const char* const* names);
  int (*destroy)(NvrtcProgram* program);
  int (*compile)(NvrtcProgram program, int count, const char* const* options);
  int (*get_log_size)(NvrtcProgram program, size_t* size);
  int (*get_log)(NvrtcProgram program, char* log);
  int (*get_cubin_size)(NvrtcProgram program, size_t* size);
  int (*get_cubin)(NvrtcProgram program, char* cubin);
};

// Set once, and of two threads that come at once either's is as good.
std::atomic<const Compiler*> located{nullptr};
std::atomic<const Library*> opened{nullptr};

const char* const NAMES[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
const std::string BUILTINS = "libnvrtc-builtins.so.";

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

std::string version_of(void* handle) {
  auto get_version = reinterpret_cast<decltype(Library::get_version)>(dlsym(handle, "nvrtcVersion"));
  int major = 0, minor = 0;
  if (!get_version || get_version(&major, &minor)) return "";
  return std::to_string(major) + "." + std::to_string(minor);
}

// By the name of NVRTC's second half, which lies beside it; empty if that leaves a doubt.
std::string version_beside(const std::string& path) {
  std::string version;
  DIR* directory = opendir(folder_of(path).c_str());
  if (!directory) return version;
  while (const dirent* file = readdir(directory)) {
    const std::string name = file->d_name;
    if (name.compare(0, BUILTINS.size(), BUILTINS) != 0) continue;
    const std::string found = name.substr(BUILTINS.size());
    if (found.find('.') == std::string::npos || found == version) continue;
    if (!version.empty()) {
      version.clear();
      break;
    }
    version = found;
  }
  closedir(directory);
  return version;
}

const Compiler* describe(void* handle, std::string path) {
  Dl_info info{};
  if (handle && dladdr(dlsym(handle, "nvrtcVersion"), &info) && info.dli_fname) path = info.dli_fname;
  struct stat file {};
  if (stat(path.c_str(), &file)) return nullptr;
  std::string version = handle ? version_of(handle) : version_beside(path);
  if (version.empty() && !handle && (handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL))) version = version_of(handle);
  if (version.empty()) return nullptr;
  return new Compiler{version + " (" + std::to_string(file.st_size) + " bytes)", path};
}

const Compiler* locate(const std::vector<std::string>& paths) {
  for (const char* name : NAMES)
    if (void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
      if (const Compiler* found = describe(handle, name)) return found;
  for (const std::string& path : paths)
    if (const Compiler* found = describe(nullptr, path)) return found;
  const char* home = std::getenv("CUDA_HOME");
  for (const char* name : NAMES) {
    if (home)
      if (const Compiler* found = describe(nullptr, std::string(home) + "/lib64/" + name)) return found;
    if (void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL))
      if (const Compiler* found = describe(handle, name)) return found;
  }
  throw std::runtime_error(
      "factorlayer: the fused CUDA kernels are compiled by NVRTC (libnvrtc.so.13 or .12), which is neither in "
      "PyTorch's packages nor on the system; install it with `pip install nvidia-cuda-nvrtc`, or set CUDA_HOME");
}

const Library* open_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!handle) throw std::runtime_error("factorlayer: NVRTC cannot be opened: " + std::string(dlerror()));
  auto library = new Library();
  auto need = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function) throw std::runtime_error("factorlayer: the NVRTC at " + path + " has no function " + name);
  };
  need(library->get_error_string, "nvrtcGetErrorString");
  need(library->get_version, "nvrtcVersion");
  need(library->create, "nvrtcCreateProgram");
  need(library->destroy, "nvrtcDestroyProgram");
  need(library->compile, "nvrtcCompileProgram");
  need(library->get_log_size, "nvrtcGetProgramLogSize");
  need(library->get_log, "nvrtcGetProgramLog");
  need(library->get_cubin_size, "nvrtcGetCUBINSize");
  need(library->get_cubin, "nvrtcGetCUBIN");
  // NVRTC asks the loader for its second half by name, which finds it in a package only if it is there already.
  dlopen((folder_of(path) + BUILTINS + version_of(handle)).c_str(), RTLD_LAZY | RTLD_GLOBAL);
  return library;
}

}  // namespace

const Compiler* find_compiler() { return located.load(std::memory_order_acquire); }

const Compiler& locate_compiler(const std::vector<std::string>& paths) {
  if (!find_compiler()) located.store(locate(paths), std::memory_order_release);
  return *find_compiler();
}

Compiled compile(const std::string& source, const std::string& name, const std::string& architecture,
                 const std::vector<std::string>& options) {
  const Compiler* compiler = find_compiler();
  if (!compiler) throw std::logic_error("factorlayer: compile() before locate_compiler()");
  if (!opened.load(std::memory_order_acquire)) opened.store(open_library(compiler->path), std::memory_order_release);
  const Library* nvrtc = opened.load(std::memory_order_acquire);
  NvrtcProgram program = nullptr;
  if (int error = nvrtc->create(&program, source.c_str(), (name + ".cu").c_str(), 0, nullptr, nullptr))
    throw CompilationFailed("factorlayer: NVRTC could not begin: " + std::string(nvrtc->get_error_string(error)), "");
  const std::string target = "--gpu-architecture=" + architecture;
  std::vector<const char*> words = {target.c_str()};
  for (const std::string& option : options) words.push_back(option.c_str());
  const int error = nvrtc->compile(program, int(words.size()), words.data());

  auto read = [&](auto get_size, auto get) {
    size_t size = 0;
    if (get_size(program, &size)) return std::string();
    std::string text(size, '\0');
    if (get(program, &text[0])) text.clear();
    return text;
  };
  Compiled result;
  result.log = read(nvrtc->get_log_size, nvrtc->get_log);
  while (!result.log.empty() && (result.log.back() == '\0' || result.log.back() == '\n')) result.log.pop_back();
  if (!error) result.cubin = read(nvrtc->get_cubin_size, nvrtc->get_cubin);
  nvrtc->destroy(&program);
  if (error || result.cubin.empty())
    throw CompilationFailed("factorlayer: NVRTC " + compiler->version + " could not compile kernel " + name + " for " +
                                architecture + ": " + nvrtc->get_error_string(error) + "\n" + result.log,
                            result.log);
  return result;
}

}  // namespace factorlayer::cuda
