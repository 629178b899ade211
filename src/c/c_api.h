// What the files of the C interface share: errors as codes, tensors as views.
#pragma once
#include <string>
#include <string_view>

#include "bittern/c/bittern.h"
#include "bittern/status.h"
#include "bittern/tensor.h"
#include "core/guarded.h"

namespace bittern::c_api {

// Keeps the message for bittern_last_error().
bittern_code fail(Code code, std::string_view message) noexcept;

// Runs f() -> Status; what it throws stays on this side.
template <class F>
bittern_code run(F&& f) noexcept {
  const Status status = guarded("", f);
  return status.ok() ? BITTERN_OK : fail(status.code(), status.message());
}

Status null(const char* function, const char* argument);
Status check_device(bittern_device device);
Status check_preference(bittern_preference preference);

// Dtype, device, shape and strides; `where` is "op: operand". Without strides, those of a dense
// tensor.
Status to_view(const std::string& where, const bittern_tensor& tensor, MutView& view);

}  // namespace bittern::c_api
