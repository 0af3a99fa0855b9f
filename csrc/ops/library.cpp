// The raw ops by name: factorlayer::forward and backward, on a GPU forward_states for what keeps states, for a stack stack_forward, stack_states, stack_backward and, with
// weights that stay as they are, stack_prepare and stack_frozen; of an x that is several tensors side by side inputs_forward,
// inputs_backward and, on a GPU, inputs_gradients; for a recurrence, recurrence and recurrence_backward; for a decoder's step, decode,
// draw and few; and questions without tensors. Callers are autograd/layer_ops.py, stack_ops.py, input_ops.py, recurrent_ops.py,
// decode_ops.py, stacks/frozen.py and exported graphs.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(factorlayer, m) {
  m.def("forward(Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor");
  m.def("forward_states(Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor[]");
  m.def("backward(Tensor grad_y, Tensor x, Tensor[] weights, Tensor? bias, str chain, int wanted) -> Tensor[]");
  m.def("inputs_forward(Tensor[] inputs, Tensor[] tensors, str stack) -> Tensor");
  m.def("inputs_backward(Tensor grad_y, Tensor[] inputs, Tensor[] tensors, str stack, int[] wanted) -> Tensor[]");
  m.def("inputs_gradients(Tensor grad_y, Tensor[] inputs, Tensor[] weights, str chain) -> Tensor[]");
  m.def("stack_forward(Tensor x, Tensor[] tensors, str stack) -> Tensor");
  m.def("stack_states(Tensor x, Tensor[] tensors, str stack) -> Tensor[]");
  m.def("stack_prepare(Tensor values, str stack) -> Tensor");
  m.def("stack_frozen(Tensor x, Tensor frozen, str stack) -> Tensor");
  m.def("stack_backward(Tensor grad_y, Tensor x, Tensor[] tensors, str stack, int[] wanted) -> Tensor[]");
  m.def("layers_backward(Tensor grad_y, Tensor x, Tensor[] states, Tensor[] tensors, str stack, int[] wanted) -> "
        "Tensor[]");
  m.def("slopes(Tensor beside, Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor");
  m.def("slopes_and_sums(Tensor beside, Tensor x, Tensor[] weights, Tensor? bias, str chain) -> (Tensor, Tensor)");
  m.def("weight_gradient(Tensor grad_y, Tensor x, str chain) -> Tensor");
  m.def("gradients(Tensor grad_y, Tensor x, Tensor[] weights, str chain, int wanted) -> Tensor[]");
  m.def("recurrence(Tensor[] gates, Tensor initial, Tensor[] weights, Tensor? bias, Tensor? starts, Tensor? first, "
        "Tensor? lengths, Tensor? offsets, SymInt[] numbers, str recurrence) -> Tensor");
  m.def("recurrence_backward(Tensor grad_output, Tensor output, Tensor[] gates, Tensor initial, Tensor[] weights, Tensor? bias, "
        "Tensor? starts, Tensor? first, Tensor? lengths, Tensor? offsets, SymInt[] numbers, str recurrence) -> Tensor[]");
  m.def("recurrence_slopes(Tensor[] gates, Tensor before, Tensor[] products, Tensor? bias, str recurrence) -> Tensor[]");
  m.def("recurrence_through(Tensor grad_output, Tensor[] slopes, Tensor initial, Tensor[] weights, Tensor? starts, Tensor? first, "
        "Tensor? lengths, Tensor? offsets, SymInt[] numbers, bool joined, str recurrence) -> Tensor[]");
  m.def("decode(Tensor tokens, Tensor state, Tensor? context, Tensor[] tensors, Tensor(a!)? random, float temperature, "
        "str decoder) -> (Tensor, Tensor)");
  m.def("few(Tensor scores, int count) -> (Tensor, Tensor)");
  m.def("draw(Tensor scores, Tensor? places, Tensor(a!) random, float temperature) -> Tensor");
  m.def("instruction_set() -> str");
  m.def("batch_class(int batch) -> int");
  m.def("plan(str chain, str dtype, int batch_class, int capability, int processors, int shared_bytes, int memory_rate=0) "
        "-> str");
  m.def("ask_planner(str question, str chain, str dtype, int batch_class, int capability, int processors, int shared_bytes, "
        "int memory_rate=0) -> str");
  m.def("limits(int device) -> (int, int, int, int)");
  m.def("prepare(str chain, str dtype, int batch_class, int device) -> str[]");
  m.def("install(str chain, str dtype, int batch_class, int device, str plan) -> str[]");
  m.def("failure(str chain, str dtype, int batch_class, int device) -> str[]");
  m.def("compile(str source, str kernel, str architecture, str[] options) -> (Tensor, str, str)");
  m.def("compiler() -> str[]");
  m.def("fill_cache(str plan) -> str[]");
  m.def("cache_entries() -> str[]");
  m.def("cache_folder() -> str");
  m.def("remove_cache_entries(bool all) -> int");
  m.def("cache_occupied() -> int");
  m.def("cache_limit() -> int");
  m.def("set_cache_limit(int bytes) -> str");
}
