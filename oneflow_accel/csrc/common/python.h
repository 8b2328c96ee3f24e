// The few names of CPython's stable ABI that the plug-in uses, so that building it needs a C++
// compiler but no Python headers. They are found in the interpreter that loads the plug-in.
#pragma once

#include <cstdint>

extern "C" {

struct _typeobject;

// PyObject_HEAD.
struct _object {
  intptr_t ob_refcnt;
  _typeobject* ob_type;
};

using PyObject = _object;
using PyTypeObject = _typeobject;

extern PyTypeObject PyTuple_Type;
extern PyObject* PyExc_IndexError;
extern PyObject* PyExc_NotImplementedError;
extern PyObject* PyExc_RuntimeError;
extern PyObject* PyExc_TypeError;

// The thread's state, of which only the address is used here.
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* thread);
int PyGILState_Check();
// Null on a thread that Python does not know.
void* PyGILState_GetThisThreadState();
void PyErr_SetString(PyObject* type, const char* message);
int PyType_IsSubtype(PyTypeObject* type, PyTypeObject* base);
PyObject* PyTuple_New(intptr_t size);
intptr_t PyTuple_Size(PyObject* tuple);
PyObject* PyTuple_GetItem(PyObject* tuple, intptr_t index);
// Takes over the reference to `item`.
int PyTuple_SetItem(PyObject* tuple, intptr_t index, PyObject* item);
void Py_DecRef(PyObject* object);

}  // extern "C"
