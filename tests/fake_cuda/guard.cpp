// A CUDA without a device, for torch built without CUDA: autograd and streams ask for it even where tensors are fake.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
