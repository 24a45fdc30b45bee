// Calls of attention on a GPU without Python: launches of compiled kernels, and the node of the autograd graph.
//
//   Launch     a kernel for one kind of call: all its arguments but the addresses
//   Call       forward and backward pass of operands of one dtype, shape and layout
//   Node       the backward pass in the graph: the coefficients of every row, then the gradients
//
// A kind of call is computed once by Python (hopper.py, hopper_backward.py), which compiles the kernels; every later
// call is made here. What is not made here goes back to Python: second derivatives, cotangents of a transform, missing
// or unusual cotangents, saved tensors that hooks have laid out anew. Both ways launch the same kernels with the same arguments: results are equal bit for bit.
//
// Built on the machine that uses it (cpp_calls.py), against its Python, its torch and the cuda.h that Triton brings.

#include <cuda.h>
#include <dlfcn.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

// CUDA's driver -------------------------------------------------------------------------------------------------------

// Functions of the driver and of torch that are found when the first kernel is launched: a machine without a GPU has
// neither library.
struct Driver {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuCtxSetCurrent) set_context;
  decltype(&cuDevicePrimaryCtxRetain) primary_context;
  int32_t (*current_stream)(int32_t device, void** stream);

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  void check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    error_string(result, &text);
    TORCH_CHECK(false, "gradlogz could not ", what, ": ", text ? text : "unknown error of CUDA");
  }

  // A thread of the autograd engine has no context before its first call of CUDA's runtime.
  void enter(int device) const {
    CUcontext context = nullptr;
    check(current_context(&context), "ask for the context of CUDA");
    if (context) return;
    check(primary_context(&context, device), "get the context of CUDA");
    check(set_context(context), "set the context of CUDA");
  }

  CUstream stream(int device) const {
    void* stream = nullptr;
    TORCH_CHECK(current_stream(device, &stream) == 0, "gradlogz could not ask torch for the current stream");
    return static_cast<CUstream>(stream);
  }

 private:
  Driver() {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(cuda && torch_cuda, "gradlogz found no driver of CUDA, or no torch for it");
    find(cuda, "cuLaunchKernelEx", launch);
    find(cuda, "cuTensorMapEncodeTiled", encode);
    find(cuda, "cuGetErrorString", error_string);
    find(cuda, "cuCtxGetCurrent", current_context);
    find(cuda, "cuCtxSetCurrent", set_context);
    find(cuda, "cuDevicePrimaryCtxRetain", primary_context);
    find(torch_cuda, "aoti_torch_get_current_cuda_stream", current_stream);
  }

  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    TORCH_CHECK(function, "gradlogz found no function ", name);
  }
};

// Launches ------------------------------------------------------------------------------------------------------------

// The map of a tensor that a kernel reads or writes by tiles, without its address; sizes from the last dimension on.
struct TensorMap {
  int swizzle, element_type;
  std::vector<cuuint64_t> sizes, strides;  // strides in bytes, without the last dimension's
  std::vector<cuuint32_t> tile;

  TensorMap(int swizzle, int element_size, int element_type, const std::vector<cuuint32_t>& tile,
            const std::vector<cuuint64_t>& sizes, const std::vector<cuuint64_t>& strides)
      : swizzle(swizzle), element_type(element_type), sizes(sizes.rbegin(), sizes.rend()),
        tile(tile.rbegin(), tile.rend()) {
    for (size_t i = strides.size() - 1; i-- > 0;) this->strides.push_back(strides[i] * element_size);
  }

  void encode(void* address, CUtensorMap& map) const {
    static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    const Driver& driver = Driver::get();
    driver.check(driver.encode(&map, static_cast<CUtensorMapDataType>(element_type), sizes.size(), address,
                               sizes.data(), strides.data(), tile.data(), ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 "describe a tensor to the GPU");
  }
};

// A parameter of a kernel: the map or the address of an operand, or a number that is always the same.
struct Parameter {
  enum Kind { MAP, ADDRESS, NUMBER } kind;
  size_t index;  // of the operand, of MAP and ADDRESS
  uint64_t number;
};

constexpr size_t MOST_MAPS = 8, MOST_OPERANDS = 12, MOST_PARAMETERS = 128;
using Operands = std::array<Tensor, MOST_OPERANDS>;  // undefined tensors are missing operands

py::object wrap(const Tensor& t) {
  return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::object(py::none());
}

template <class Tensors>
py::tuple wrap_all(const Tensors& tensors) {
  py::tuple tuple(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) tuple[i] = wrap(tensors[i]);
  return tuple;
}

class Launch {
 public:
  Launch(uint64_t function, unsigned programs, unsigned threads, unsigned shared_bytes, bool cooperative,
         const std::vector<TensorMap>& maps, const std::vector<std::pair<std::string, py::object>>& parameters)
      : function_(reinterpret_cast<CUfunction>(function)), programs_(programs), threads_(threads),
        shared_bytes_(shared_bytes), cooperative_(cooperative), maps_(maps) {
    TORCH_CHECK(maps.size() <= MOST_MAPS && parameters.size() <= MOST_PARAMETERS, "a kernel has too many arguments");
    for (const auto& [kind, value] : parameters) parameters_.push_back(read(kind, value));
  }

  // A function of the operands in Python in place of a kernel: for tests on machines without a GPU.
  explicit Launch(py::function function) : in_python_(new py::function(std::move(function))) {}

  // Operands in the order of Kernel.launch: those read by tiles, then those passed by address.
  void operator()(const Operands& operands) const {
    if (in_python_) {
      py::gil_scoped_acquire gil;
      (*in_python_)(*wrap_all(operands));
      return;
    }
    const Driver& driver = Driver::get();
    int device = operands[0].get_device();
    driver.enter(device);
    void* addresses[MOST_OPERANDS];
    for (size_t i = 0; i < MOST_OPERANDS; ++i) addresses[i] = operands[i].defined() ? operands[i].data_ptr() : nullptr;
    alignas(64) CUtensorMap maps[MOST_MAPS];
    for (size_t i = 0; i < maps_.size(); ++i) maps_[i].encode(addresses[i], maps[i]);
    void* arguments[MOST_PARAMETERS + 2];
    size_t count = 0;
    for (const Parameter& p : parameters_)
      if (p.kind == Parameter::MAP) arguments[count++] = &maps[p.index];
      else if (p.kind == Parameter::ADDRESS) arguments[count++] = &addresses[p.index];
      else arguments[count++] = const_cast<uint64_t*>(&p.number);
    void* no_scratch = nullptr;  // Triton's last two arguments: memory that these kernels do not use
    arguments[count++] = &no_scratch;
    arguments[count++] = &no_scratch;
    CUlaunchAttribute together{};
    together.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    together.value.cooperative = 1;
    CUlaunchConfig config{};
    config.gridDimX = programs_;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = threads_;
    config.sharedMemBytes = shared_bytes_;
    config.hStream = driver.stream(device);
    config.attrs = &together;
    config.numAttrs = cooperative_;
    driver.check(driver.launch(&config, function_, arguments, nullptr), "launch a kernel of attention");
  }

 private:
  static Parameter read(const std::string& kind, const py::object& value) {
    Parameter p{Parameter::NUMBER, 0, 0};
    if (kind == "map" || kind == "address") {
      p.kind = kind == "map" ? Parameter::MAP : Parameter::ADDRESS;
      p.index = value.cast<size_t>();
      TORCH_CHECK(p.index < MOST_OPERANDS, "a kernel has too many operands");
    } else if (kind == "fp32" || kind == "f32") {
      float number = value.cast<float>();
      std::memcpy(&p.number, &number, sizeof number);
    } else {  // integers of 32 and 64 bits: the first bytes of 64, on machines that have GPUs
      p.number = static_cast<uint64_t>(value.cast<int64_t>());
    }
    return p;
  }

  CUfunction function_ = nullptr;
  unsigned programs_ = 0, threads_ = 0, shared_bytes_ = 0;
  bool cooperative_ = false;
  py::function* in_python_ = nullptr;  // never freed: it may outlive Python
  std::vector<TensorMap> maps_;
  std::vector<Parameter> parameters_;
};

// The forward pass ----------------------------------------------------------------------------------------------------

constexpr int64_t COUNTED = 64;                           // of gpu.py: queries of a counter behind the coefficients
constexpr size_t ROWS = 5;                                // statistics of a row
enum { OUTPUT, LOG_NORMALIZER, ENTROPY, VARIANCE, TOP, MEAN };  // results, and their cotangents

// The backward pass for cotangents of one kind.
struct Backward {
  Launch coefficients, gradients;
  Tensor plan;
  int64_t per_row;  // coefficients of a row
};

// Which rows have cotangents, and the strides of that of the output.
using CotangentKind = std::pair<int, std::vector<int64_t>>;

struct Call {
  Launch forward;
  Tensor plan;
  py::object backward_in_python;  // (call, saved, cotangents, whether they are usual) -> gradients
  std::map<CotangentKind, Backward> backward;
  std::mutex mutex;

  const Backward* find(const CotangentKind& kind) {
    std::lock_guard<std::mutex> lock(mutex);
    auto known = backward.find(kind);
    return known == backward.end() ? nullptr : &known->second;
  }

  void add(const CotangentKind& kind, Backward&& recorded) {
    std::lock_guard<std::mutex> lock(mutex);
    backward.emplace(kind, std::move(recorded));
  }

  // Destroyed with the last node, maybe in a thread of the engine, maybe after Python.
  ~Call() {
    if (!Py_IsInitialized()) {
      backward_in_python.release();
      return;
    }
    py::gil_scoped_acquire gil;
    backward_in_python = py::object();
  }
};

bool is_plain(const Tensor& t, c10::Device device) {
  constexpr c10::DispatchKeySet others({
      c10::DispatchKey::Python, c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor,
      c10::DispatchKey::Negative, c10::DispatchKey::Conjugate});
  return t.device() == device && !t.key_set().has_any(others);
}

// What a recorded launch knows of an operand beside its address.
struct Form {
  at::ScalarType dtype;
  c10::SmallVector<int64_t, 4> sizes, strides;
  uintptr_t offset;  // from a multiple of 16 bytes

  explicit Form(const Tensor& t)
      : dtype(t.scalar_type()), sizes(t.sizes().begin(), t.sizes().end()),
        strides(t.strides().begin(), t.strides().end()), offset(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16) {}

  bool operator==(const Form& other) const {
    return dtype == other.dtype && sizes == other.sizes && strides == other.strides && offset == other.offset;
  }
};

// As descriptors require: rows that start at multiples of 16 bytes.
bool is_aligned(const Tensor& t) {
  auto s = t.strides();
  int64_t bytes = t.element_size();
  return s[3] == 1 && s[0] && s[1] && s[2] && (s[0] | s[1] | s[2]) * bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

// Nodes are held by std::shared_ptr up to torch 2.12, and by c10::intrusive_ptr after.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Pointer, class N>
Pointer pointer_to(N* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) return node->shared_from_this();
  else return Pointer::unsafe_reclaim_from_nonowning(node);
}

template <class Pointer, class N>
Pointer owner_of(N* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
    return Pointer(node, [](auto* n) { deleteNode(n); });  // long graphs without recursion
  else return Pointer(c10::intrusive_ptr<N>::unsafe_steal_from_new(node));
}

class AttendBackward : public Node {
 public:
  AttendBackward(std::shared_ptr<Call> call, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), call_(std::move(call)) {}

  std::string name() const override { return "AttendBackward"; }

  void save(const Tensor& query, const Tensor& key, const Tensor& value, const std::array<Tensor, 1 + ROWS>& results) {
    saved_.reserve(3 + ROWS);
    for (const Tensor* t : {&query, &key, &value}) saved_.emplace_back(*t, false);
    for (size_t i = OUTPUT; i <= TOP; ++i) saved_.emplace_back(results[i], true);
    forms_.reserve(3 + ROWS);
    for (const Tensor* t : {&query, &key, &value}) forms_.emplace_back(*t);
    for (size_t i = OUTPUT; i <= TOP; ++i) forms_.emplace_back(results[i]);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& s : saved_) s.reset_data();
  }

  variable_list apply(variable_list&& cotangents) override {
    variable_list saved;
    saved.reserve(saved_.size());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const SavedVariable& s : saved_) saved.push_back(s.unpack(pointer_to<NodePointer>(this)));
    }
    bool usual = is_usual(saved, cotangents);
    if (usual) {
      // Rows contiguous as the kernel reads them; the output's cotangent as its tiles are read.
      Tensor& grad_output = cotangents[OUTPUT];
      if (!is_aligned(grad_output)) grad_output = grad_output.clone(at::MemoryFormat::Contiguous);
      int rows = 0;
      for (int i : {LOG_NORMALIZER, ENTROPY, VARIANCE})
        if (cotangents[i].defined()) {
          cotangents[i] = aligned_row(cotangents[i]);
          rows |= 1 << i;
        }
      const Backward* known = call_->find({rows, grad_output.strides().vec()});
      if (known) return by_kernels(*known, saved, cotangents);
    }
    return in_python(saved, cotangents, usual);
  }

 private:
  bool is_usual(const variable_list& saved, const variable_list& cotangents) const {
    c10::Device device = call_->plan.device();
    if (at::GradMode::is_enabled() || c10::impl::dispatch_mode_enabled()) return false;
    if (!cotangents[OUTPUT].defined() || cotangents[TOP].defined() || cotangents[MEAN].defined()) return false;
    for (const Tensor& t : cotangents)
      if (t.defined() && !is_plain(t, device)) return false;
    for (size_t i = 0; i < saved.size(); ++i)  // hooks of saved tensors may return others
      if (!is_plain(saved[i], device) || !(Form(saved[i]) == forms_[i])) return false;
    return true;
  }

  static Tensor aligned_row(const Tensor& t) {
    bool ready = t.is_contiguous() && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
    return ready ? t : t.clone(at::MemoryFormat::Contiguous);
  }

  static variable_list by_kernels(const Backward& backward, const variable_list& saved, const variable_list& g) {
    RECORD_FUNCTION("gradlogz::attention_backward", std::vector<c10::IValue>());
    at::AutoDispatchBelowADInplaceOrView plain;
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2];
    auto rows = query.options().dtype(at::kFloat);
    auto b = query.size(0), h = query.size(1), n = query.size(2), d = query.size(3);
    Tensor per_row = at::empty({b * h * (backward.per_row * n + (n + COUNTED - 1) / COUNTED)}, rows);
    backward.coefficients({saved[3], g[OUTPUT], saved[4], saved[5], saved[6], g[LOG_NORMALIZER], g[ENTROPY],
                           g[VARIANCE], per_row});
    Tensor grad_query = at::empty_like(query), grad_key = at::empty_like(key), grad_value = at::empty_like(value);
    Tensor sums = at::empty({b, h, n, d}, rows);
    backward.gradients({query, key, value, g[OUTPUT], grad_key, grad_value, sums, per_row, backward.plan});
    grad_query.copy_(sums);
    return {grad_query, grad_key, grad_value};
  }

  variable_list in_python(const variable_list& saved, const variable_list& cotangents, bool usual) {
    py::gil_scoped_acquire gil;
    py::object call = py::cast(call_), is_usual = py::bool_(usual);
    py::tuple all = wrap_all(saved), given = wrap_all(cotangents);
    PyObject* returned = PyObject_CallFunctionObjArgs(
        call_->backward_in_python.ptr(), call.ptr(), all.ptr(), given.ptr(), is_usual.ptr(), nullptr);
    if (!returned) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
    variable_list gradients;
    for (const py::handle& each : py::reinterpret_steal<py::tuple>(returned))
      gradients.push_back(each.is_none() ? Tensor() : THPVariable_Unpack(each.ptr()));
    return gradients;
  }

  std::shared_ptr<Call> call_;
  std::vector<SavedVariable> saved_;
  std::vector<Form> forms_;  // of the saved tensors
};

void forward(const std::shared_ptr<Call>& call, const Tensor& query, const Tensor& key, const Tensor& value,
             std::array<Tensor, 1 + ROWS>& results) {
  RECORD_FUNCTION("gradlogz::attention", std::vector<c10::IValue>());
  {
    at::AutoDispatchBelowADInplaceOrView plain;
    results[OUTPUT] = at::empty_like(query);
    Tensor rows = at::empty({ROWS, query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
    for (size_t i = 0; i < ROWS; ++i) results[1 + i] = rows.select(0, i);
  }
  call->forward({query, key, value, results[OUTPUT], results[LOG_NORMALIZER], results[ENTROPY], results[VARIANCE],
                 results[TOP], results[MEAN], call->plan});
  if (torch::autograd::compute_requires_grad(query, key, value)) {
    auto* node = new AttendBackward(call, torch::autograd::collect_next_edges(query, key, value));
    NodePointer owner = owner_of<NodePointer>(node);
    for (const Tensor& t : results) torch::autograd::set_history(t, owner);
    node->save(query, key, value, results);
  }
}

// Output, log normaliser, entropy, variance, maximum and mean; None if Python must make this call.
py::object attend(const std::shared_ptr<Call>& call, py::handle q, py::handle k, py::handle v) {
  const Tensor &query = THPVariable_Unpack(q.ptr()), &key = THPVariable_Unpack(k.ptr()),
               &value = THPVariable_Unpack(v.ptr());
  for (const Tensor* t : {&query, &key, &value})
    if (!is_plain(*t, call->plan.device()) || reinterpret_cast<uintptr_t>(t->data_ptr()) % 16) return py::none();
  std::array<Tensor, 1 + ROWS> results;
  {
    py::gil_scoped_release others;
    forward(call, query, key, value, results);
  }
  return wrap_all(results);
}

Tensor tensor(const py::object& t) { return THPVariable_Unpack(t.ptr()); }

}  // namespace

PYBIND11_MODULE(MODULE_NAME, m) {
  py::class_<TensorMap>(m, "TensorMap")
      .def(py::init<int, int, int, std::vector<cuuint32_t>, std::vector<cuuint64_t>, std::vector<cuuint64_t>>());
  py::class_<Launch>(m, "Launch")
      .def(py::init<uint64_t, unsigned, unsigned, unsigned, bool, std::vector<TensorMap>,
                    std::vector<std::pair<std::string, py::object>>>())
      .def(py::init<py::function>());
  py::class_<Call, std::shared_ptr<Call>>(m, "Call")
      .def(py::init([](const Launch& forward, const py::object& plan, py::object backward_in_python) {
        return std::shared_ptr<Call>(new Call{forward, tensor(plan), std::move(backward_in_python), {}, {}});
      }))
      .def("add_backward", [](Call& call, int rows, const std::vector<int64_t>& strides, const Launch& coefficients,
                              const Launch& gradients, const py::object& plan, int64_t per_row) {
        call.add({rows, strides}, Backward{coefficients, gradients, tensor(plan), per_row});
      });
  m.def("attend", &attend);
  m.def("find_driver", [] { Driver::get(); });  // raises where a library or a function is missing
}
