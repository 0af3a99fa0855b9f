// What the ops ask of Python when a kernel is first needed, never on the way of a call that has its kernel. In a process
// without Python they must do without. None of these may be called with a lock held: they wait for Python's own.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

namespace factorlayer::python {

// Of what the extension and the Python package call of each other: one higher with every change, as in autograd/build.py.
constexpr int interface = 16;

// An exception that Python code raised; `lasting` if the same call would raise it again.
struct Error : std::runtime_error {
  Error(const std::string& message, bool lasting) : std::runtime_error(message), lasting(lasting) {}
  bool lasting;
};

// factorlayer.autograd.runtime.planner: what tells one planner from another.
std::string planner();

// What a plan depends on of a GPU: compute capability, multiprocessors, bytes of shared memory for a block, and bytes that
// memory moves in a microsecond by its clock and its bus, 0 where nobody says.
struct Limits {
  int capability, processors, shared_bytes, memory_rate;
};

// factorlayer.plan.planner.plan_text: the plan of a chain on a GPU.
std::string plan_text(const std::string& chain, const std::string& dtype, int batch_class, const Limits& gpu);

// What another function of factorlayer.plan.planner says of a chain on a GPU.
std::string ask_planner(const std::string& question, const std::string& chain, const std::string& dtype,
                        int batch_class, const Limits& gpu);

// factorlayer.autograd.runtime.nvrtc_paths: where NVRTC may be among the Python packages.
std::vector<std::string> nvrtc_paths();

// factorlayer.autograd.runtime.warn, or stderr without Python.
void warn(const std::string& message);

}  // namespace factorlayer::python
