// Calls of Python functions, and the module that Python imports.
// Weak, so that a process without Python can load this library as well. Only functions: data would need Python at once.
#pragma weak Py_IsInitialized
#pragma weak PyGILState_Ensure
#pragma weak PyGILState_Release
#pragma weak PyErr_Fetch
#pragma weak PyImport_ImportModule
#pragma weak PyModule_Create2
#pragma weak PyObject_CallMethod
#pragma weak PyObject_GetAttrString
#pragma weak PyObject_Str
#pragma weak PyUnicode_AsUTF8AndSize
#pragma weak Py_DecRef
#include "python.h"

#include <Python.h>

#include <algorithm>
#include <cstdio>

namespace factorlayer::python {
namespace {

// Python's lock, for as long as it lives.
class Lock {
 public:
  Lock() : state_(PyGILState_Ensure()) {}
  ~Lock() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// A reference that is given back.
class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {}
  Object(const Object&) = delete;
  ~Object() {
    if (object_) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

std::string text_of(PyObject* object) {
  const Object text(object ? PyObject_Str(object) : nullptr);
  Py_ssize_t size = 0;
  const char* data = text.get() ? PyUnicode_AsUTF8AndSize(text.get(), &size) : nullptr;
  return data ? std::string(data, size_t(size)) : "";
}

[[noreturn]] void raise() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Object owned_type(type), owned_value(value), owned_trace(trace);
  const Object name(type ? PyObject_GetAttrString(type, "__name__") : nullptr);
  const std::string kind = text_of(name.get());
  throw Error(kind + ": " + text_of(value), kind != "KeyboardInterrupt" && kind != "MemoryError");
}

bool is_running() { return Py_IsInitialized && Py_IsInitialized(); }

template <class... Arguments>
std::string call(const char* module_name, const char* function, const char* format, Arguments... arguments) {
  if (!is_running())
    throw Error("there is no Python in this process to plan with; put the plan into the table with "
                "factorlayer::install",
                false);
  const Lock lock;
  const Object module(PyImport_ImportModule(module_name));
  if (!module.get()) raise();
  const Object result(PyObject_CallMethod(module.get(), function, format, arguments...));
  if (!result.get()) raise();
  return text_of(result.get());
}

}  // namespace

std::string planner() { return call("factorlayer.runtime", "planner", ""); }

std::string plan_text(const std::string& chain, const std::string& dtype, int batch_class, int capability,
                      int processors, int shared_bytes) {
  return call("factorlayer.planner", "plan_text", "ssiiii", chain.c_str(), dtype.c_str(), batch_class, capability,
              processors, shared_bytes);
}

std::string ask_planner(const std::string& question, const std::string& chain, const std::string& dtype, int capability,
                        int processors, int shared_bytes) {
  return call("factorlayer.planner", question.c_str(), "ssiii", chain.c_str(), dtype.c_str(), capability, processors,
              shared_bytes);
}

std::vector<std::string> nvrtc_paths() {
  std::vector<std::string> paths;
  if (!is_running()) return paths;
  const std::string lines = call("factorlayer.runtime", "nvrtc_paths", "");
  for (size_t start = 0; start < lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    paths.push_back(lines.substr(start, end - start));
    start = end + 1;
  }
  return paths;
}

void warn(const std::string& message) {
  if (is_running())
    call("factorlayer.runtime", "warn", "s", message.c_str());
  else
    std::fprintf(stderr, "%s\n", message.c_str());
}

}  // namespace factorlayer::python

// The module itself is empty: importing it registers the ops.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
