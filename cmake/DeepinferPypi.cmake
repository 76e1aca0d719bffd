# di_pypi(NAME VERSION SHA256 sdist|wheel OUT_DIR)
#
# Unpacks a pinned archive of the Python package index at configure time and sets OUT_DIR to the
# folder with its contents. The archive with this SHA-256 is looked for in ${DI_DEPS_DIR}/pypi (a
# mirror or a distribution tarball may fill it), then in .deps/pypi of the checkout, which survives
# a removed build folder; otherwise the user's own pip fetches it into .deps/pypi, when DI_FETCH is
# on. pip refuses an archive whose hash differs, and so does this function.

option(DI_FETCH "Fetch pinned source archives with pip when they are not on this machine" ON)
set(DI_DEPS_DIR "" CACHE PATH "A folder with archives under pypi/ that is looked into before fetching")

# Sets OUT to the path of a file in FOLDER with this SHA-256, or to "".
function(di_find_archive OUT FOLDER NAME SHA256)
  set(${OUT} "" PARENT_SCOPE)
  file(GLOB candidates "${FOLDER}/${NAME}-*.tar.gz" "${FOLDER}/${NAME}-*.whl")
  foreach(candidate ${candidates})
    file(SHA256 "${candidate}" found)
    if(found STREQUAL "${SHA256}")
      set(${OUT} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(di_pypi NAME VERSION SHA256 KIND OUT_DIR)
  string(SUBSTRING "${SHA256}" 0 12 short_hash)
  set(unpacked "${CMAKE_BINARY_DIR}/pypi/${NAME}-${VERSION}-${short_hash}")
  set(${OUT_DIR} "${unpacked}" PARENT_SCOPE)
  if(EXISTS "${unpacked}/.complete")
    return()
  endif()

  if(KIND STREQUAL "sdist")
    set(kind_option --no-binary)
  elseif(KIND STREQUAL "wheel")
    set(kind_option --only-binary)
  else()
    message(FATAL_ERROR "di_pypi(${NAME}): the kind is '${KIND}'; allowed are sdist and wheel.")
  endif()

  set(cache "${CMAKE_SOURCE_DIR}/.deps/pypi")
  set(archive "")
  if(DI_DEPS_DIR)
    di_find_archive(archive "${DI_DEPS_DIR}/pypi" ${NAME} ${SHA256})
  endif()
  if(NOT archive)
    di_find_archive(archive "${cache}" ${NAME} ${SHA256})
  endif()
  if(NOT archive)
    set(advice "Put an archive with this SHA-256 into ${cache}, or into pypi/ of a folder named by -DDI_DEPS_DIR=...")
    if(NOT DI_FETCH)
      message(FATAL_ERROR "${NAME} ${VERSION} (SHA-256 ${SHA256}) is not on this machine and DI_FETCH is OFF. ${advice}")
    endif()
    message(STATUS "Fetching ${NAME} ${VERSION} with pip")
    set(requirements "${CMAKE_BINARY_DIR}/pypi/${NAME}.txt")
    file(WRITE "${requirements}" "${NAME}==${VERSION} --hash=sha256:${SHA256}\n")
    file(MAKE_DIRECTORY "${cache}")
    execute_process(
      COMMAND python3 -m pip download -q --disable-pip-version-check --no-deps ${kind_option} ${NAME} --require-hashes
              -r "${requirements}" -d "${cache}"
      RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(failed)
      message(FATAL_ERROR "pip could not fetch ${NAME} ${VERSION}:\n${output}\n${advice}")
    endif()
    di_find_archive(archive "${cache}" ${NAME} ${SHA256})
    if(NOT archive)
      message(FATAL_ERROR "pip left no archive of ${NAME} with SHA-256 ${SHA256} in ${cache}.")
    endif()
  endif()

  # Unpacked beside its place and moved there, so that an interrupted configure leaves no half folder.
  file(REMOVE_RECURSE "${unpacked}" "${unpacked}.part")
  file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${unpacked}.part")
  if(KIND STREQUAL "sdist")
    file(GLOB inner "${unpacked}.part/*")
    file(RENAME "${inner}" "${unpacked}")
    file(REMOVE_RECURSE "${unpacked}.part")
  else()
    file(RENAME "${unpacked}.part" "${unpacked}")
  endif()
  file(TOUCH "${unpacked}/.complete")
endfunction()
