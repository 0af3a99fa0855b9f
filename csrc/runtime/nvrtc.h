// NVRTC, the compiler of CUDA source that PyTorch's CUDA wheels bring along, opened when it is first needed.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

namespace factorlayer::cuda {

struct Compiler {
  std::string version;  // 13.0 and the library's size, which tells its builds apart
  std::string path;
};

// Null until locate_compiler found one.
const Compiler* find_compiler();

// What this process has loaded already, else the first of these paths that is a file, else the system's. It is not
// opened for that where the version can be read off the files beside it: opening takes 15 ms, and a kernel that the cache
// has needs only the version. Throws a std::runtime_error that says what to install.
const Compiler& locate_compiler(const std::vector<std::string>& paths);

struct Compiled {
  std::string cubin, log;
};

struct CompilationFailed : std::runtime_error {
  CompilationFailed(const std::string& message, const std::string& log) : std::runtime_error(message), log(log) {}
  std::string log;
};

// For one architecture, such as sm_90, by the compiler located. Throws CompilationFailed.
Compiled compile(const std::string& source, const std::string& name, const std::string& architecture,
                 const std::vector<std::string>& options);

}  // namespace factorlayer::cuda
