// Calls of Python functions, and the module that Python imports, with eager mode's calls.
// Weak, so that a process without Python can load this library as well. Only functions: data would need Python at once.
#pragma weak PyCapsule_GetPointer
#pragma weak PyCapsule_New
#pragma weak PyErr_Clear
#pragma weak PyErr_Fetch
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyFloat_AsDouble
#pragma weak PyGILState_Ensure
#pragma weak PyGILState_Release
#pragma weak PyImport_ImportModule
#pragma weak PyList_GetItem
#pragma weak PyList_GetSlice
#pragma weak PyList_New
#pragma weak PyList_SetItem
#pragma weak PyList_Size
#pragma weak PyLong_AsLong
#pragma weak PyModule_AddIntConstant
#pragma weak PyModule_AddStringConstant
#pragma weak PyModule_Create2
#pragma weak PyObject_CallFunctionObjArgs
#pragma weak PyObject_CallMethod
#pragma weak PyObject_CallObject
#pragma weak PyObject_GetAttr
#pragma weak PyObject_GetAttrString
#pragma weak PyObject_IsTrue
#pragma weak PyObject_SetAttr
#pragma weak PyObject_Str
#pragma weak PySequence_Concat
#pragma weak PySequence_Tuple
#pragma weak PyTuple_GetItem
#pragma weak PyTuple_GetSlice
#pragma weak PyTuple_New
#pragma weak PyTuple_SetItem
#pragma weak PyTuple_Size
#pragma weak PyType_GetFlags
#pragma weak PyUnicode_AsUTF8AndSize
#pragma weak PyUnicode_CompareWithASCIIString
#pragma weak PyUnicode_FromStringAndSize
#pragma weak Py_DecRef
#pragma weak Py_IncRef
#pragma weak Py_IsInitialized
#include "python.h"

#include <Python.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "chain.h"
#include "eager.h"

namespace factorlayer::python {
namespace {

// Holds Python's lock for as long as it lives.
class Lock {
 public:
  Lock() : state_(PyGILState_Ensure()) {}
  ~Lock() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Owns a reference to a Python object, and gives it back at the end.
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

std::string planner() { return call("factorlayer.autograd.runtime", "planner", ""); }

std::string plan_text(const std::string& chain, const std::string& dtype, int batch_class, const Limits& gpu) {
  return call("factorlayer.plan.planner", "plan_text", "ssiiiii", chain.c_str(), dtype.c_str(), batch_class, gpu.capability,
              gpu.processors, gpu.shared_bytes, gpu.memory_rate);
}

std::string ask_planner(const std::string& question, const std::string& chain, const std::string& dtype,
                        int batch_class, const Limits& gpu) {
  return call("factorlayer.plan.planner", question.c_str(), "ssiiiii", chain.c_str(), dtype.c_str(), gpu.capability,
              gpu.processors, gpu.shared_bytes, gpu.memory_rate, batch_class);
}

std::vector<std::string> nvrtc_paths() {
  std::vector<std::string> paths;
  if (!is_running()) return paths;
  const std::string lines = call("factorlayer.autograd.runtime", "nvrtc_paths", "");
  for (size_t start = 0; start < lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    paths.push_back(lines.substr(start, end - start));
    start = end + 1;
  }
  return paths;
}

void warn(const std::string& message) {
  if (is_running())
    call("factorlayer.autograd.runtime", "warn", "s", message.c_str());
  else
    std::fprintf(stderr, "%s\n", message.c_str());
}

}  // namespace factorlayer::python

namespace factorlayer::eager {
namespace {

using python::Object;

// What autograd/layer_ops.py has handed over, once and for good.
struct {
  PyObject *none, *tensor, *parameter, *exchange, *to_tensors, *apply, *apply_inputs, *apply_stack, *is_grad_enabled;
  PyObject *precision, *cuda, *matmul;
  PyObject *unusual, *forward_mode, *level, *requires_grad, *is_neg, *text, *to_save;
} known;

// dlpack.h: PyTorch's functions for exchanges, of which this one describes a tensor
struct Exchange {
  uint32_t major, minor;
  void *older, *allocate, *from_python, *to_python;
  int (*describe)(void* tensor, Given* to);
};
int (*describe)(void* tensor, Given* to) = nullptr;

// On their way to the Function that records them: y, and states that it keeps, by which text
thread_local PyObject *made_y = nullptr, *made_states = nullptr;
thread_local const std::string* made_by_text = nullptr;

PyObject* begin(PyObject*, PyObject* given) {
  Py_ssize_t at = 0;
  for (PyObject** place : {&known.none, &known.tensor, &known.parameter, &known.exchange, &known.to_tensors, &known.apply,
                           &known.apply_inputs, &known.apply_stack, &known.is_grad_enabled, &known.precision, &known.cuda,
                           &known.matmul, &known.unusual,
                           &known.forward_mode, &known.level, &known.requires_grad, &known.is_neg, &known.text,
                           &known.to_save})
    if (!(*place = PyTuple_GetItem(given, at++))) return nullptr;
  const auto* exchange = static_cast<Exchange*>(PyCapsule_GetPointer(known.exchange, "dlpack_exchange_api"));
  if (!exchange) return nullptr;
  if (exchange->major == 1) describe = exchange->describe;
  Py_IncRef(given);
  Py_IncRef(known.none);
  return known.none;
}

// Returns None, so that Python calls the raw ops: they raise what is wrong, if anything is.
PyObject* none() {
  PyErr_Clear();
  Py_IncRef(known.none);
  return known.none;
}

bool is_true(PyObject* answer) {
  const Object owned(answer);
  return answer && PyObject_IsTrue(answer) > 0;
}

bool ask(PyObject* function) { return is_true(PyObject_CallObject(function, nullptr)); }

// Whether nothing watches operators or replaces tensors: no autocast, transform, mode, trace or profiler. Autocast does not count
// where the tensors are in its dtype already.
bool is_usual(bool is_cast = false) {
  for (Py_ssize_t i = is_cast, count = PyTuple_Size(known.unusual); i < count; ++i)
    if (ask(PyTuple_GetItem(known.unusual, i))) return false;
  const Object level(PyObject_GetAttr(known.forward_mode, known.level));
  return level.get() && PyLong_AsLong(level.get()) < 0;
}

bool is_tf32_allowed() {
  const Object found(PyObject_CallFunctionObjArgs(known.precision, known.cuda, known.matmul, nullptr));
  return found.get() && !PyUnicode_CompareWithASCIIString(found.get(), "tf32");
}

// Whether a tensor of one number is a view that is negated by name only. Others show it by a stride: is_plain in ops/eager.cpp.
bool is_negated(PyObject* tensor, const Given& given) {
  return std::all_of(given.sizes, given.sizes + given.dimensions, [](int64_t size) { return size == 1; }) &&
         is_true(PyObject_CallFunctionObjArgs(known.is_neg, tensor, nullptr));
}

// The tensors as the eager calls take them, if all are of a type of PyTorch's own; else none. They are valid while the tensors live.
std::vector<Given> given_of(const std::vector<PyObject*>& tensors) {
  std::vector<Given> given(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensors[i]));
    if ((type != known.tensor && type != known.parameter) || describe(tensors[i], &given[i])) return {};
    if (is_negated(tensors[i], given[i])) return {};
  }
  return given;
}

// A Python list that takes the tensors over.
PyObject* tensors_of(const std::vector<Handle>& handles) {
  const Object capsules(PyList_New(Py_ssize_t(handles.size())));
  for (size_t i = 0; i < handles.size(); ++i)
    PyList_SetItem(capsules.get(), Py_ssize_t(i), PyCapsule_New(handles[i], nullptr, nullptr));
  return PyObject_CallFunctionObjArgs(known.to_tensors, capsules.get(), nullptr);
}

// What `run` returns, called without Python's lock; nothing if it throws.
template <class Run>
auto without_lock(const Run& run) {
  decltype(run()) made{};
  PyThreadState* const state = PyEval_SaveThread();
  try {
    made = run();
  } catch (...) {
  }
  PyEval_RestoreThread(state);
  return made;
}

// The text of a chain that takes tensors with these features, side by side.
std::string text_of_inputs(const std::vector<Given>& inputs, size_t count, const std::string& chain) {
  std::string text = "inputs";
  for (size_t i = 0; i < count; ++i)
    text += " " + std::to_string(inputs[i].dimensions ? inputs[i].sizes[inputs[i].dimensions - 1] : 0);
  return text + "; " + chain;
}

// The y that a text makes of the tensors `found`, `of_weights` of them weights behind the `first`, and whether it has to be recorded.
// y is null if the raw ops have to make it, or, with Python's error set, if memory ran out.
struct Answer {
  PyObject* y = nullptr;
  bool recorded = false;
};

Answer made_by(const std::string& text, bool chooses, const std::vector<PyObject*>& tensors, const std::vector<Given>& found,
               size_t first = 0, size_t of_weights = 0) {
  auto needs_grad = [](PyObject* tensor) { return is_true(PyObject_GetAttr(tensor, known.requires_grad)); };
  const bool recorded = ask(known.is_grad_enabled) && std::any_of(tensors.begin(), tensors.end(), needs_grad);
  const auto weights = tensors.begin() + Py_ssize_t(first);
  const bool all = recorded && of_weights && std::all_of(weights, weights + Py_ssize_t(of_weights), needs_grad);
  const Recorded how = all ? Recorded::of_all : recorded ? Recorded::of_some : Recorded::no;
  const Made made = without_lock([&] { return forward(text, chooses, how, found); });
  if (made.tensors.empty()) return {none(), false};
  const Object list(tensors_of(made.tensors));
  PyObject* const y = list.get() ? PyList_GetItem(list.get(), 0) : nullptr;
  if (y) Py_IncRef(y);
  if (y && made.kept) {
    const Object states(PyList_GetSlice(list.get(), 1, PyList_Size(list.get())));
    made_states = PySequence_Tuple(states.get());
    made_by_text = made.kept;
  }
  return {y, recorded};
}

// y, once a Function has recorded it.
PyObject* recorded_by(PyObject* apply, const Object& arguments, PyObject* y) {
  made_y = y;
  PyObject* const result = PyObject_CallObject(apply, arguments.get());
  if (made_y) Py_DecRef(std::exchange(made_y, nullptr));
  if (made_states) Py_DecRef(std::exchange(made_states, nullptr));
  return result;
}
// y, once a Function has recorded it that is called with the text and the tensors: weights, and a bias behind them, as of a stack.
PyObject* recorded_by(PyObject* apply, const std::string& text, const std::vector<PyObject*>& tensors, PyObject* y) {
  const Object arguments(PyTuple_New(Py_ssize_t(1 + tensors.size())));
  PyTuple_SetItem(arguments.get(), 0, PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    Py_IncRef(tensors[i]);
    PyTuple_SetItem(arguments.get(), Py_ssize_t(1 + i), tensors[i]);
  }
  return recorded_by(apply, arguments, y);
}

// layer(chain, chain with tf32, whether to choose, x or a list of tensors, bias, weights, whether autocast has cast them) returns y,
// recorded if it has to be, or None.
PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t given_count) {
  const Object weights(PySequence_Tuple(given[5]));
  const bool is_cast = given_count > 6 && PyObject_IsTrue(given[6]) > 0;
  if (!weights.get() || !describe || !is_usual(is_cast)) return none();
  PyObject *const x = given[3], *const bias = given[4];
  const bool several = PyList_Check(x) || PyTuple_Check(x);
  const Object inputs(several ? PySequence_Tuple(x) : nullptr);
  std::vector<PyObject*> tensors;
  if (several)
    for (Py_ssize_t i = 0; i < PyTuple_Size(inputs.get()); ++i) tensors.push_back(PyTuple_GetItem(inputs.get(), i));
  else
    tensors.push_back(x);
  const size_t count_of_x = tensors.size();
  if (!count_of_x || (several && count_of_x == 1)) return none();
  for (Py_ssize_t i = 0; i < PyTuple_Size(weights.get()); ++i) tensors.push_back(PyTuple_GetItem(weights.get(), i));
  if (bias != known.none) tensors.push_back(bias);
  const std::vector<Given> found = given_of(tensors);
  if (found.empty()) return none();

  PyObject* const chain = given[found[0].is_float_on_gpu() && is_tf32_allowed()];
  const bool chooses = PyObject_IsTrue(given[2]) > 0;
  std::string text = python::text_of(chain);
  if (several) text = text_of_inputs(found, count_of_x, text);
  const auto [y, recorded] = made_by(text, chooses, tensors, found, count_of_x, size_t(PyTuple_Size(weights.get())));
  if (!recorded || !y) return y;
  if (several) return recorded_by(known.apply_inputs, text, tensors, y);
  const Py_ssize_t count = 3 + PyTuple_Size(weights.get());
  const Object arguments(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const each = i == 0 ? chain : i == 1 ? x : i == 2 ? bias : PyTuple_GetItem(weights.get(), i - 3);
    Py_IncRef(each);
    PyTuple_SetItem(arguments.get(), i, each);
  }
  return recorded_by(known.apply, arguments, y);
}

// stack(layers, layers with tf32, whether to choose, x, weights and biases layer by layer) returns y, recorded if it has to be, or
// None.
PyObject* stack(PyObject*, PyObject* const* given, Py_ssize_t) {
  const Object others(PySequence_Tuple(given[4]));
  if (!others.get() || !describe || !is_usual()) return none();
  std::vector<PyObject*> tensors{given[3]};
  for (Py_ssize_t i = 0; i < PyTuple_Size(others.get()); ++i) tensors.push_back(PyTuple_GetItem(others.get(), i));
  const std::vector<Given> found = given_of(tensors);
  if (found.empty()) return none();
  const std::string text = python::text_of(given[found[0].is_float_on_gpu() && is_tf32_allowed()]);
  const auto [y, recorded] = made_by(text, PyObject_IsTrue(given[2]) > 0, tensors, found);
  return recorded && y ? recorded_by(known.apply_stack, text, tensors, y) : y;
}

// take(chain, dtype, device, samples, whether recorded): from now on layer() takes the kernels for these where it chooses.
PyObject* take_kernels(PyObject*, PyObject* const* given, Py_ssize_t) {
  const std::string text = python::text_of(given[0]), dtype = python::text_of(given[1]);
  const long device = PyLong_AsLong(given[2]), batch = PyLong_AsLong(given[3]);
  const bool recorded = PyObject_IsTrue(given[4]) > 0;
  try {
    take(text, dtype, int(device), batch, recorded);
  } catch (...) {  // then every call is left to the raw ops
  }
  return none();
}

// settle(chain, dtype, device, samples, the chain that keeps states or ""): how layer() runs this one from now on if it is recorded.
PyObject* settle_states(PyObject*, PyObject* const* given, Py_ssize_t) {
  const std::string text = python::text_of(given[0]), dtype = python::text_of(given[1]), kept = python::text_of(given[4]);
  const long device = PyLong_AsLong(given[2]), batch = PyLong_AsLong(given[3]);
  try {
    settle(text, dtype, int(device), batch, kept);
  } catch (...) {  // then every such call is left to the raw ops
  }
  return none();
}

// Whether a tensor behind the text, x and the bias gets a gradient.
bool learns(PyObject* context) {
  const Object needs(PyObject_GetAttrString(context, "needs_input_grad"));
  for (Py_ssize_t i = needs.get() ? PyTuple_Size(needs.get()) : 0; i > 3; --i)
    if (PyObject_IsTrue(PyTuple_GetItem(needs.get(), i - 1)) > 0) return true;
  return false;
}

// The forward(ctx, chain, x, bias, *weights) of the Function that records: its y has been made already. States are saved behind the
// tensors, and the text by which they are kept. Where no weight learns, its keep_less(chain, tensors) says what to save, if it has that.
PyObject* record(PyObject*, PyObject* given) {
  PyObject *const context = PyTuple_GetItem(given, 0), *const text = PyTuple_GetItem(given, 1);
  const Object tensors(PyTuple_GetSlice(given, 2, PyTuple_Size(given)));  // save_for_backward does no more than this
  const Object less(learns(context) ? nullptr : PyObject_CallMethod(context, "keep_less", "OO", text, tensors.get()));
  PyErr_Clear();
  const Object more(made_states ? PySequence_Concat(tensors.get(), made_states) : nullptr);
  if (made_states) {
    Py_DecRef(std::exchange(made_states, nullptr));
    const Object name(PyUnicode_FromStringAndSize("kept", 4));
    const Object kept(PyUnicode_FromStringAndSize(made_by_text->data(), Py_ssize_t(made_by_text->size())));
    if (!more.get() || PyObject_SetAttr(context, name.get(), kept.get())) return nullptr;
  }
  PyObject* const saved = more.get() ? more.get() : less.get() ? less.get() : tensors.get();
  if (PyObject_SetAttr(context, known.to_save, saved)) return nullptr;
  if (PyObject_SetAttr(context, known.text, text)) return nullptr;
  return std::exchange(made_y, nullptr);
}

// gradients(chain, grad_y, (x, bias, *weights), (whether the chain, x, .. need one)) returns what the Function's backward does, or
// None. The tensors of a chain with several inputs are (*inputs, *weights, bias), those of a stack (x, *weights and biases).
PyObject* gradients(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *const saved = given[2], *const needs = given[3];
  const Py_ssize_t count = PyTuple_Size(saved);
  if (count > kMostBits) return none();
  int64_t wanted = 0;
  for (Py_ssize_t i = 0; i < count; ++i) wanted |= int64_t(PyObject_IsTrue(PyTuple_GetItem(needs, i + 1)) > 0) << i;
  const std::string text = python::text_of(given[0]);
  std::vector<PyObject*> tensors{given[1], PyTuple_GetItem(saved, 0)};
  const bool several = text.rfind("inputs ", 0) == 0 || is_stack(text);
  for (Py_ssize_t i = several ? 1 : 2; i < count; ++i) tensors.push_back(PyTuple_GetItem(saved, i));
  PyObject* const bias = several ? known.none : PyTuple_GetItem(saved, 1);
  if (bias != known.none) tensors.push_back(bias);
  const std::vector<Given> found = describe && is_usual() ? given_of(tensors) : std::vector<Given>();
  if (found.empty()) return none();

  const std::vector<Handle> made = without_lock([&] { return eager::gradients(text, found, wanted); });
  if (made.empty()) return none();
  const Object list(tensors_of(made));
  if (!list.get()) return nullptr;
  PyObject* const result = PyTuple_New(1 + count);
  for (Py_ssize_t i = 0, next = 0; i <= count; ++i) {
    PyObject* const each = i && wanted >> (i - 1) & 1 ? PyList_GetItem(list.get(), next++) : known.none;
    Py_IncRef(each);
    PyTuple_SetItem(result, i, each);
  }
  return result;
}

// decode(text, tokens, state, context, random, (parameters), temperature) returns tokens or scores, and the state; or None.
PyObject* decode(PyObject*, PyObject* const* given, Py_ssize_t) {
  if (!describe || !is_usual()) return none();
  PyObject* const parameters = given[5];
  const Py_ssize_t count = PyTuple_Size(parameters);
  if (count < 0) return none();
  std::vector<Given> found(size_t(4 + count));  // without data where nothing is given
  for (Py_ssize_t i = 0; i < 4 + count; ++i) {
    PyObject* const tensor = i < 4 ? given[1 + i] : PyTuple_GetItem(parameters, i - 4);
    if (i > 1 && i < 4 && tensor == known.none) continue;
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if ((type != known.tensor && type != known.parameter) || describe(tensor, &found[size_t(i)])) return none();
    if (found[size_t(i)].code == 2 && is_negated(tensor, found[size_t(i)])) return none();
  }
  const double temperature = PyFloat_AsDouble(given[6]);
  const std::string text = python::text_of(given[0]);
  const std::vector<Handle> made = without_lock([&] { return eager::decode(text, found, temperature); });
  return made.empty() ? none() : tensors_of(made);
}

PyMethodDef methods[] = {{"begin", begin, METH_O, nullptr},
                         {"layer", reinterpret_cast<PyCFunction>(layer), METH_FASTCALL, nullptr},
                         {"stack", reinterpret_cast<PyCFunction>(stack), METH_FASTCALL, nullptr},
                         {"take", reinterpret_cast<PyCFunction>(take_kernels), METH_FASTCALL, nullptr},
                         {"settle", reinterpret_cast<PyCFunction>(settle_states), METH_FASTCALL, nullptr},
                         {"record", record, METH_VARARGS, nullptr},
                         {"gradients", reinterpret_cast<PyCFunction>(gradients), METH_FASTCALL, nullptr},
                         {"decode", reinterpret_cast<PyCFunction>(decode), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace factorlayer::eager

// Importing the module registers the ops. autograd/build.py asks it what it was built for.
PyMODINIT_FUNC PyInit__C() {
  using factorlayer::eager::methods;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* const module = PyModule_Create(&definition);
  if (!module) return nullptr;
  if (PyModule_AddStringConstant(module, "version", FACTORLAYER_VERSION) ||
      PyModule_AddIntConstant(module, "interface", factorlayer::python::interface)) {
    Py_DecRef(module);
    return nullptr;
  }
  return module;
}
