# The CUDA toolchain for SM90 and SM100, and the choice between CUDA kernels, their emulation on the CPU, and none.

if(NOT DI_CUDA MATCHES "^(off|on|emulated)$")
  message(FATAL_ERROR "DI_CUDA='${DI_CUDA}' is not one of off, on, emulated")
endif()
if(DI_CUDA STREQUAL "on")
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_ARCHITECTURES ${DI_CUDA_ARCHS})
  enable_language(CUDA)
  # CMake 3.25 does not know C++20 for nvcc; set after enable_language, never before.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
  # CMake writes -isystem=PATH, which ccache does not make relative.
  set(CMAKE_INCLUDE_SYSTEM_FLAG_CUDA "-isystem ")
  if(CCACHE_PROGRAM)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()

# di_cuda_sources(TARGET a.cu ...): kernels of a target. Fused multiply-adds are written explicitly, as in all our code.
function(di_cuda_sources target)
  if(DI_CUDA STREQUAL "on")
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE CUDA COMPILE_OPTIONS
      "--fmad=false;--expt-relaxed-constexpr;-Xcudafe;--diag_suppress=177;-DFMT_USE_CONSTEXPR=1;-Xcompiler=-Wall")
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/src/ops/cuda/native)
  else()
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS
      "-x;c++;-Wno-unknown-pragmas;-O2")
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/src/ops/cuda/emulated)
  endif()
endfunction()
