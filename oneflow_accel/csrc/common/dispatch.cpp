// How Python runs operators that only the plug-in has. OneFlow's Python functions are generated
// for its own operators; this takes any operator expression, through the same dispatcher, so that
// eager, nn.Graph, local and global tensors all work.
#include <memory>
#include <string>

#include "common/library.h"
#include "common/oneflow.h"
#include "common/python.h"
#include "oneflow/core/common/exception.h"
#include "oneflow/core/common/maybe.h"
#include "oneflow/core/framework/tensor_tuple.h"

namespace oneflow::one {

// Declared here: the headers that hold these include files that the wheel does not ship.
class OpExpr;

class OpInterpUtil {
 public:
  template <typename T>
  static Maybe<T> Dispatch(const OpExpr& op_expr, const TensorTuple& inputs);
};

}  // namespace oneflow::one

namespace oneflow_accel {

namespace {

using ::oneflow::one::OpExpr;
using ::oneflow::one::OpInterpUtil;
using ::oneflow::one::Tensor;
using ::oneflow::one::TensorTuple;

// A tensor object of Python.
struct PyTensorObject {
  PyObject head;
  std::shared_ptr<Tensor> data;
};

// What OneFlow's Python module has for its own functions. Looked up by name: the module has no
// soname, so a library cannot be linked to it, and Python loads it out of the linker's sight.
struct {
  bool (*is_expression)(PyObject*);
  std::shared_ptr<OpExpr> (*unpack_expression)(PyObject*);
  PyObject* (*new_tensor)(const std::shared_ptr<Tensor>&);
  PyTypeObject** tensor_type;
} module;

void bind(const char* path) {
  const Library library(path, RTLD_LAZY | RTLD_NOLOAD);
  library.look_up("_ZN7oneflow3one10functional13PyOpExprCheckEP7_object", &module.is_expression);
  library.look_up("_ZN7oneflow3one10functional14PyUnpackOpExprEP7_object",
                  &module.unpack_expression);
  library.look_up("_ZN7oneflow3one12PyTensor_NewERKSt10shared_ptrINS0_6TensorEE",
                  &module.new_tensor);
  library.look_up("_ZN7oneflow3one19PyTensorObject_TypeE", &module.tensor_type);
}

bool is_a(PyObject* object, PyTypeObject* type) { return PyType_IsSubtype(object->ob_type, type); }

TensorTuple unpack_tensors(PyObject* tuple) {
  if (!is_a(tuple, &PyTuple_Type)) {
    throw ::oneflow::TypeException("the inputs of an operator must be a tuple");
  }
  TensorTuple tensors;
  const intptr_t size = PyTuple_Size(tuple);
  for (intptr_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GetItem(tuple, i);
    if (!is_a(item, *module.tensor_type)) {
      throw ::oneflow::TypeException("input " + std::to_string(i)
                                     + " of an operator is not a oneflow.Tensor");
    }
    tensors.push_back(reinterpret_cast<PyTensorObject*>(item)->data);
  }
  return tensors;
}

// A new tuple; null, with Python's error set, where Python cannot make one.
PyObject* pack_tensors(const TensorTuple& tensors) {
  PyObject* tuple = PyTuple_New(static_cast<intptr_t>(tensors.size()));
  if (tuple == nullptr) { return nullptr; }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = module.new_tensor(tensors[i]);
    if (tensor == nullptr) {
      Py_DecRef(tuple);
      return nullptr;
    }
    PyTuple_SetItem(tuple, static_cast<intptr_t>(i), tensor);
  }
  return tuple;
}

PyObject* run(PyObject* expression, PyObject* inputs) {
  if (!module.is_expression(expression)) {
    throw ::oneflow::TypeException("an operator expression is needed");
  }
  const auto op = module.unpack_expression(expression);
  const TensorTuple tensors = unpack_tensors(inputs);
  return pack_tensors(*OpInterpUtil::Dispatch<TensorTuple>(*op, tensors).GetPtrOrThrow());
}

}  // namespace

}  // namespace oneflow_accel

extern "C" {

// To be called once before the function below; `path` is the file of oneflow._oneflow_internal.
// Returns null, or what is wrong with it.
const char* oneflow_accel_bind_module(const char* path) {
  return oneflow_accel::reason_against([&] { oneflow_accel::bind(path); });
}

// Runs a oneflow._oneflow_internal.one.UserOpExpr on a tuple of tensors, as many as it has inputs,
// and returns the tuple of its outputs. Null on failure, with the Python exception set that
// OneFlow's own functions would raise. The caller holds the GIL, as it does in those functions:
// where OneFlow has to wait for its executor, OneFlow releases it.
PyObject* oneflow_accel_run(PyObject* expression, PyObject* inputs) {
  try {
    return oneflow_accel::run(expression, inputs);
  } catch (const ::oneflow::TypeException& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const ::oneflow::IndexException& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const ::oneflow::NotImplementedException& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // extern "C"
