# di_module(NAME sched SOURCES a.cc b.cc DEPS base [PRIVATE_DEPS ...] [TESTS a_test.cc] [TEST_DEPS ...])
#
# Declares one module of src/ as the static library deepinfer_<name>. DEPS are the modules (short
# names) it may use; a module's test executable links nothing but the module and its declared
# dependencies, so that a forbidden dependency fails at link time. PRIVATE_DEPS and TEST_DEPS are
# CMake targets of third-party libraries.
function(di_module)
  cmake_parse_arguments(ARG "" "NAME" "SOURCES;DEPS;PRIVATE_DEPS;TESTS;TEST_DEPS" ${ARGN})
  set(target deepinfer_${ARG_NAME})
  add_library(${target} STATIC ${ARG_SOURCES})
  target_include_directories(${target} PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  foreach(dep ${ARG_DEPS})
    target_link_libraries(${target} PUBLIC deepinfer_${dep})
  endforeach()
  target_link_libraries(${target} PRIVATE deepinfer_warnings ${ARG_PRIVATE_DEPS})
  if(DI_BUILD_TESTS AND ARG_TESTS)
    di_test(NAME ${ARG_NAME}_test SOURCES ${ARG_TESTS} DEPS ${target} ${ARG_TEST_DEPS})
  endif()
endfunction()

# di_test(NAME x_test SOURCES ... DEPS targets... [LABELS fast|slow] [TIMEOUT seconds])
#
# One GoogleTest executable. Tests find data through the compile definitions DI_TEST_DATA_DIR (files in the
# repository, tests/data) and DI_SHARED_DIR (optional larger recordings beside the checkout; tests that need
# them skip visibly when they are absent).
function(di_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS fast)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} deepinfer_warnings GTest::gmock GTest::gtest
                                            GTest::gtest_main rapidcheck)
  target_compile_definitions(
    ${ARG_NAME} PRIVATE DI_TEST_DATA_DIR="${CMAKE_SOURCE_DIR}/tests/data"
                        DI_SHARED_DIR="${CMAKE_SOURCE_DIR}/../shared"
                        DI_BINARY_DIR="${CMAKE_BINARY_DIR}/bin")
  gtest_discover_tests(
    ${ARG_NAME} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
