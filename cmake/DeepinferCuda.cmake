# The CUDA toolchain for SM90 and SM100. No operation has a CUDA implementation yet, so this only proves that the compiler is
# usable and sets what every .cu file will be built with; the program is the CPU one.

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real)
enable_language(CUDA)
# CMake 3.25 does not know C++20 for nvcc; set after enable_language, never before.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
# CMake writes -isystem=PATH, which ccache does not make relative.
set(CMAKE_INCLUDE_SYSTEM_FLAG_CUDA "-isystem ")
if(CCACHE_PROGRAM)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
message(WARNING "DI_WITH_CUDA: found nvcc ${CMAKE_CUDA_COMPILER_VERSION}, but no operation has a CUDA implementation yet. "
                "The program built here runs on the CPU.")
