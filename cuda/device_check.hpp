// Whether a device can serve a configuration.
#ifndef VERKV_CUDA_DEVICE_CHECK_HPP
#define VERKV_CUDA_DEVICE_CHECK_HPP

#include <string>
#include <vector>

#include "layer.hpp"

namespace verkv::cuda {

// Throws InvalidArgument if the device cannot serve the layers. Returns its name.
std::string check_device(int device, const std::vector<Layer>& layers);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_DEVICE_CHECK_HPP
