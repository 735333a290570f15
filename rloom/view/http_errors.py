"""Requests that get an error as JSON instead of what they ask for."""

from http import HTTPStatus


class RequestFault(Exception):
    """Its message is shown to the user."""

    status = HTTPStatus.BAD_REQUEST


class BadRequest(RequestFault):
    pass


class NotFound(RequestFault):
    status = HTTPStatus.NOT_FOUND


class Forbidden(RequestFault):
    status = HTTPStatus.FORBIDDEN


class NotWritable(RequestFault):
    """The folder of the run does not take what the user wants to write."""

    status = HTTPStatus.CONFLICT
